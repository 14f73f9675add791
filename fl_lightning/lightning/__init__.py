# SPDX-License-Identifier: Apache-2.0
"""Everything that touches private parts of Lightning lives here; ``names`` checks that they still exist.

Uses ``core``, ``metrics``, ``ops`` and ``arguments``. No other room names a private attribute or a submodule of
Lightning.
"""
