# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx; build_site.py runs it."""

import os
import re

import fl_lightning

project = "fl_lightning"
author = "the fl_lightning authors"
release = version = fl_lightning.__version__
language = "en"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "myst_nb",
]

highlight_language = "none"  # of blocks that name no language: commands and formulas

html_theme = "furo"
html_title = f"fl_lightning {release}"
html_static_path = ["static"]
html_extra_path = ["../llms.txt"]
html_css_files = ["site.css"]
html_show_sourcelink = html_show_copyright = False
pygments_dark_style = "github-dark"
html_theme_options = {
    "source_repository": "https://github.com/fl-lightning/fl-lightning",
    "light_css_variables": {"color-brand-primary": "#2f6f8f", "color-brand-content": "#2f6f8f"},
    "dark_css_variables": {"color-brand-primary": "#7fb8d4", "color-brand-content": "#7fb8d4"},
}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Docstrings are Google's style with roles of Sphinx. What Lightning and torch bring is left to their own sites.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {
    "inherited-members": "object,Module,DataHooks,ModelHooks,CheckpointHooks,HyperparametersMixin,LightningModule,"
    "LightningDataModule,Metric,Callback,SingleDeviceStrategy,Strategy,Optimizer,Dataset,Sampler,RuntimeError,tuple,ABC",
}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
napoleon_numpy_docstring = False

# Roles in docstrings must lead to something public of this package, or to one of these parts, which contributors read.
contributors_parts = [
    "core", "clients", "lightning", "ops.slices", "ops.solvers", "arguments.checked", "comparison.limits",
    "comparison.plan", "report.gains", "report.runs_of_a_method", "report.tables", "federation.registered_clients",
    "fit.options", "fit.readable",
    "algorithms._shared", "algorithms.features", "algorithms.groups", "algorithms.ditto",
]  # fmt: skip
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!fl_lightning\.).*")]
nitpick_ignore_regex += [(r"py:.*", rf"fl_lightning\.{re.escape(part)}\b.*") for part in contributors_parts]

# The notebooks run while the site is built, in an empty folder and on one thread, and again when their cells change.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_merge_streams = True
os.environ.setdefault("OMP_NUM_THREADS", "1")

linkcheck_anchors = False  # GitHub makes the anchors of its pages with a script
linkcheck_retries = 2
linkcheck_timeout = 20
# The repository's own addresses answer once it is public; links to its files are checked when pages are assembled.
linkcheck_ignore = [r"https://github\.com/fl-lightning/.*"]
