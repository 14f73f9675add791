// SPDX-License-Identifier: Apache-2.0
// Memory that a thread keeps between tasks: allocating and touching fresh pages for each would cost more than the work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fl_lightning::cpu {

class Scratch {
 public:
  // At least this many bytes, aligned for vectors; the next call may move them.
  void* reserve(std::int64_t bytes) {
    if (bytes > size_) {
      store_.reset(new char[static_cast<std::size_t>(bytes) + kAlign]);
      size_ = bytes;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(store_.get());
    return store_.get() + (kAlign - address % kAlign) % kAlign;
  }

 private:
  static constexpr std::size_t kAlign = 64;
  std::unique_ptr<char[]> store_;
  std::int64_t size_ = 0;
};

}  // namespace fl_lightning::cpu
