// SPDX-License-Identifier: Apache-2.0
// Outputs too large for the caches: they are written past them, into large pages.
//
// Fresh memory comes in pages of 4 KiB, each with a fault at first touch. For a large output these faults cost as much
// as the pass that writes it. Linux gives pages of 2 MiB where it is asked to.
#pragma once

#include <cstdint>

#include "kernels/rows.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fl_lightning::cpu {

inline bool beyond_cache(const Matrix& rows) {
  return (rows.rows + 1) * rows.columns * size_of(rows.dtype) >= kStreamBytes;
}

// Only advice: it may do nothing, and never changes what the memory holds.
inline void ask_for_large_pages(void* memory, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t page = std::uintptr_t{1} << 21;
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + static_cast<std::uintptr_t>(bytes)) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

}  // namespace fl_lightning::cpu
