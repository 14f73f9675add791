// SPDX-License-Identifier: Apache-2.0
// CUDA's blocks, threads, barriers, warp exchanges and shared memory on the processor, for tests of device code.
//
// Every thread of a block is a fiber, and one thread runs at a time. A schedule decides which: orders that keep the
// threads in step hide missing barriers, so warps may also run ahead of each other. Shared arrays and the device's
// memory remember who touched what since the last barrier and report a race whatever the schedule; between the blocks
// of a launch there is none. Tensor cores are modelled in mma.cpp, and those of a warpgroup with the copies that feed
// them in warpgroup.cpp. Not modelled: atomics, the cost of anything.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace simt {

// The next ready thread upwards or downwards; any; the first of the lowest warp; the last of the highest.
enum class Schedule : int { forward, reverse, random, low_warp, high_warp };

constexpr int kWarp = 32, kWarpgroup = 128;
constexpr int kMaxThreads = 1024;
constexpr int kSharedBytes = 48 * 1024;  // that any launch may have

void configure(Schedule schedule, unsigned seed);
// Runs body once per thread of every block. Throws std::runtime_error with what went wrong. The body and what it begins
// with lie on the caller's stack.
// Blocks have shared memory of so many bytes by the launch, and of so many in all.
void run(unsigned blocks, unsigned threads, const std::function<void()>& body, std::size_t launch_bytes = 0,
         std::size_t most_bytes = kSharedBytes);
std::size_t launch_bytes();
std::size_t most_bytes();
// Ends the launch with an error; from inside a kernel only.
[[noreturn]] void fail(const std::string& message);

void barrier(const char* file, int line);
// Waits for the warp; afterwards peer(lane) is what that lane put in.
void exchange(unsigned mask, std::uint64_t value, const char* file, int line);
std::uint64_t peer(int lane);
// Waits for the warpgroup; the last thread that comes acts for all before any of them goes on.
void gather(const std::function<void()>& act, const char* file, int line);

// mma.sync.aligned with these fragments: m16n8k8 of TF32 numbers, m16n8k16 of float16 or bfloat16 ones. Sums are cut
// off as by the least accurate hardware that PTX's words allow, see mma.cpp.
void mma(const char* shape, const char* types, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
         const float (&c)[4], const char* file = __builtin_FILE(), int line = __builtin_LINE());

// Where in time an access lies: the numbers rise with every barrier of the block and with every exchange of the warp.
struct Moment {
  std::uint32_t block = 0, warp = 0;
  std::int16_t thread = -1;

  bool same_warp(const Moment& other) const { return thread / kWarp == other.thread / kWarp; }
  // Whether nothing orders an earlier access before this one. All before a certain moment are in order.
  bool races_with(const Moment& before, std::uint32_t ordered_until) const;
};
Moment now();
std::uint32_t block_start();
std::uint32_t launch_start();
bool runs();                         // whether a thread of a block does
bool on_stack(const void* address);  // of the running thread, or of who launched it

// One element of an array. It must have been written since a moment, and up to another one all accesses are in order.
struct Place {
  const char* name;
  std::int64_t index;
  std::uint32_t written_since, ordered_until;

  std::string name_and_index() const;
  [[noreturn]] void report(const char* what, const Moment& before) const;
};

// What one element has seen: its last write, and reads by up to two warps since.
class Watch {
 public:
  void read(const Place& place);
  void write(const Place& place);
  void write_part() { writer_ = now(); }  // of others nothing is known
  // Of tensor cores: the writer must have passed a fence since.
  void read_by_tensor_cores(const Place& place);

 private:
  Moment writer_, reader_, other_reader_;
  std::uint32_t fences_ = 0;  // that the writer had passed before
  bool several_ = false;      // lanes of the reader's warp read it at that moment
};

[[noreturn]] void fail_outside(const char* name, std::int64_t index, std::int64_t size);
void* shared_storage(const void* tag, std::size_t bytes, std::size_t counted);

constexpr unsigned kBegin = 2048 + 16;  // of every array, as a number: at no multiple of 1024 bytes

// Behaves like a pointer into a shared array.
template <class T>
class Shared {
 public:
  struct Cell {
    T value;
    Watch watch;
  };
  class Reference {
   public:
    Reference(const Shared& array, std::int64_t index) : array_(array), index_(index) {}
    operator T() const {
      array_.cells_[index_].watch.read(array_.place(index_));
      return array_.cells_[index_].value;
    }
    // As another type it would be narrowed where a kernel's pointer gives the number itself.
    template <class U>
    operator U() const = delete;
    Reference& operator=(T value) {
      array_.cells_[index_].watch.write(array_.place(index_));
      array_.cells_[index_].value = value;
      return *this;
    }
    Reference& operator=(const Reference& other) { return *this = static_cast<T>(other); }
    Reference& operator+=(T value) { return *this = static_cast<T>(*this) + value; }
    Reference& operator|=(T value) { return *this = static_cast<T>(*this) | value; }

   private:
    const Shared& array_;
    std::int64_t index_;
  };

  Shared() = default;
  Shared(const void* tag, const char* name, std::int64_t size)
      : cells_(static_cast<Cell*>(shared_storage(tag, size * sizeof(Cell), size * sizeof(T)))),
        name_(name),
        size_(size) {}
  Shared operator+() const { return *this; }
  Shared operator+(std::int64_t distance) const {
    Shared result = *this;
    result.first_ += distance;
    return result;
  }
  Reference operator[](std::int64_t index) const {
    const std::int64_t at = first_ + index;
    if (at < 0 || at >= size_) fail_outside(name_, at, size_);
    return Reference(*this, at);
  }
  // As a number, as instructions want it.
  unsigned address() const { return kBegin + static_cast<unsigned>(first_ * sizeof(T)); }
  // What tensor cores find at an address.
  T seen_by_tensor_cores(unsigned address) const {
    const std::int64_t at = (static_cast<std::int64_t>(address) - kBegin) / static_cast<std::int64_t>(sizeof(T));
    if (address < kBegin || at >= size_) fail_outside(name_, at, size_);
    cells_[at].watch.read_by_tensor_cores(place(at));
    return cells_[at].value;
  }

 private:
  Place place(std::int64_t index) const { return {name_, index, block_start(), block_start()}; }

  Cell* cells_ = nullptr;
  const char* name_ = "";
  std::int64_t size_ = 0, first_ = 0;
};

// Which memory of the device there is, until it is forgotten: rows of so many bytes, so far apart, and elements of so
// many. Of what is not given, nothing may be read before it is written.
enum class Access : int { input, output, both };
void add_memory(const char* name, const void* begin, std::int64_t rows, std::int64_t row_bytes, std::int64_t stride,
                int element, Access access);
void forget_memory();
void read_memory(const void* address, std::int64_t bytes);

// Copies bytes to shared memory, or zeros where any is false: what a thread finds there before it has waited for the
// copy is neither the old nor the new.
void copy_async(int bytes, const Shared<unsigned>& to, const void* from);
void copy_commit();
void copy_wait(int groups);
// What the running thread wrote may be read by tensor cores, behind the next barrier.
void fence_tensor_cores();
std::uint32_t fences(int thread);
// wgmma.mma_async on rows of this array: begun, multiplied any number of times, ended and waited for. The numbers are
// those that lie there at the wait; until then d is something else. Behind so many rows and others anything may lie.
unsigned address_of(const Shared<unsigned>& array);
void wgmma_begin();
void wgmma(int n, const char* types, float* d, std::uint64_t a, std::uint64_t b, bool more, int rows, int others);
void wgmma(int n, const char* types, float* d, const unsigned* a, std::uint64_t b, bool more, int others);
void wgmma_end();
void wgmma_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE());

// What a word of 32 bits holds for tensor cores: one number of TF32, or two of 16 bits.
enum class Kind { tf32, f16, bf16 };
Kind kind_of(const char* types);
double number_of(Kind kind, unsigned word, int half);

// A sum of products as tensor cores have it: aligned by the largest exponent, cut off so many bits below it, and then
// to 24 bits.
float sum_cut_off(const double (*factors)[2], int count, float sum, int bits);

template <class T>
std::uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T peer_as(int lane) {
  const std::uint64_t bits = peer(lane);
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace simt
