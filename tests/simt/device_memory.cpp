// SPDX-License-Identifier: Apache-2.0
// Memory of the device: which of it there is, and who touched it when.
//
// Kernels have plain pointers to it. Their sources are compiled with -fsanitize=thread, which puts a call of a function
// of this file before every access that might be to memory of others; nothing of the sanitizer's own is linked.
#include <cstdlib>
#include <memory>
#include <vector>

#include "simt.h"

// The linker's: where this library lies, and with it what is static in it, such as shared arrays.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];

namespace simt {
namespace {

struct Buffer {
  const char* name;
  const char* begin;
  std::int64_t rows, row_bytes, stride;  // what lies between two rows is nobody's
  int element;
  std::uint32_t written_since = 0;  // 1 of what nobody has written yet
  // Of each element, zeros at first; none of inputs.
  std::unique_ptr<Watch[], decltype(&std::free)> cells{nullptr, &std::free};

  bool holds(std::int64_t at, std::int64_t bytes) const {
    return at >= 0 && at < rows * stride && at % stride + bytes <= row_bytes;
  }
};

std::vector<Buffer> buffers;

void touch(const void* address, std::int64_t bytes, bool writes) {
  const auto* byte = static_cast<const char*>(address);
  if (!runs() || (byte >= __ehdr_start && byte < _end) || on_stack(address)) return;
  for (const Buffer& buffer : buffers) {
    const std::int64_t at = byte - buffer.begin;
    if (!buffer.holds(at, bytes)) continue;
    if (!buffer.cells && writes) fail(std::string(buffer.name) + " is written to");
    if (!buffer.cells) return;
    for (std::int64_t i = at / buffer.element; i * buffer.element < at + bytes; ++i) {
      const Place place{buffer.name, i, buffer.written_since, launch_start()};
      Watch& cell = buffer.cells[i];
      if (!writes) {
        cell.read(place);
      } else if (bytes < buffer.element) {
        cell.write_part();
      } else {
        cell.write(place);
      }
    }
    return;
  }
  fail(std::to_string(bytes) + " bytes are " + (writes ? "written" : "read") + " outside of the device's memory");
}

}  // namespace

void add_memory(const char* name, const void* begin, std::int64_t rows, std::int64_t row_bytes, std::int64_t stride,
                int element, Access access) {
  Buffer own{name, static_cast<const char*>(begin), rows, row_bytes, stride, element};
  own.written_since = access == Access::output;
  const auto count = static_cast<std::size_t>(rows * stride / element);
  if (access != Access::input) own.cells.reset(static_cast<Watch*>(std::calloc(count + 1, sizeof(Watch))));
  buffers.push_back(std::move(own));
}

void forget_memory() { buffers.clear(); }

void read_memory(const void* address, std::int64_t bytes) { touch(address, bytes, false); }

}  // namespace simt

extern "C" {

#define ACCESSES(bytes)                                                                    \
  void __tsan_read##bytes(void* address) { simt::touch(address, bytes, false); }           \
  void __tsan_write##bytes(void* address) { simt::touch(address, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* address) { simt::touch(address, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* address) { simt::touch(address, bytes, true); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* address, std::size_t bytes) { simt::touch(address, bytes, false); }
void __tsan_write_range(void* address, std::size_t bytes) { simt::touch(address, bytes, true); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

}  // extern "C"
