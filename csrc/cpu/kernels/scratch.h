// SPDX-License-Identifier: Apache-2.0
// Memory that a thread keeps between tasks: allocating and touching fresh pages for each would cost more than the work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>

#include <cstring>
#endif

namespace fl_lightning::cpu {

class Scratch {
 public:
  // At least this many bytes, aligned for vectors; the next call may move them.
  void* reserve(std::int64_t bytes) {
    if (bytes > size_ || kWatched) {
      store_.reset(new char[static_cast<std::size_t>(bytes) + kAlign]);
      size_ = bytes;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(store_.get());
    char* first = store_.get() + (kAlign - address % kAlign) % kAlign;
#if defined(__SANITIZE_ADDRESS__)
    // A read before a write finds NaN; what lies behind the bytes asked for is poisoned.
    std::memset(first, 0xff, static_cast<std::size_t>(bytes));
    ASAN_POISON_MEMORY_REGION(first + bytes, static_cast<std::size_t>(store_.get() + bytes + kAlign - (first + bytes)));
#endif
    return first;
  }

 private:
  static constexpr std::size_t kAlign = 64;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr bool kWatched = true;  // new memory for each call, so that a use of what it replaces is found
#else
  static constexpr bool kWatched = false;
#endif
  std::unique_ptr<char[]> store_;
  std::int64_t size_ = 0;
};

}  // namespace fl_lightning::cpu
