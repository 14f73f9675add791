// SPDX-License-Identifier: Apache-2.0
// Hopper's tensor cores on the processor, and the copies to shared memory that feed them.
//
// Which thread holds which element: PTX ISA, "Register Fragments and Shared Memory Matrix Layouts for wgmma". Where
// rows lie is decoded from the descriptors as the hardware does: K-major, in patterns of 8 rows of 128 bytes, whose
// runs of 16 bytes change places by the address's bits 7 to 9. Sums are cut off as mma.cpp says of the H100: the
// products of one instruction at once, 25 bits below the leading one, then to 24 bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <vector>

#include "include/cuda_runtime.h"

namespace simt {
namespace {

struct Copy {
  Shared<unsigned> to;
  std::vector<unsigned> words;
};
struct Copies {
  std::uint32_t block = 0;  // that they belong to
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  std::uint32_t fences = 0;
};
Copies copies[kMaxThreads];

Copies& own_copies() {
  Copies& own = copies[now().thread];
  if (own.block != block_start()) {
    own.open.clear();
    own.groups.clear();
    own.block = block_start();
  }
  return own;
}

Shared<unsigned> matrices;  // the array that addresses were last asked of

constexpr int kRows = 64, kDepth = 16;  // the most columns
using Rows = double[256][kDepth];

// One side of one instruction: rows of 8 columns, or 16 of numbers of 16 bits. What lies behind `count` is NaN.
void load_rows(std::uint64_t descriptor, Kind kind, int rows, int count, Rows& to) {
  const auto field = [&](int first, int bits) {
    return static_cast<unsigned>(descriptor >> first & ((std::uint64_t{1} << bits) - 1));
  };
  const unsigned start = field(0, 14) << 4, distance = field(32, 14) << 4;
  if (field(62, 2) != 1) fail("a descriptor of rows that are not 128 bytes");
  if (field(49, 3) != 0 || start & 0x380u) fail("a descriptor of rows within a pattern of 1024 bytes");
  const int halves = kind == Kind::tf32 ? 1 : 2;
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < 8; ++k) {
      const unsigned address = start + row / 8 * distance + row % 8 * 128 + k * 4;
      const auto place = address ^ (address >> 7 & 7u) << 4;
      const unsigned word = row < count ? matrices.seen_by_tensor_cores(place) : 0;
      for (int h = 0; h < halves; ++h) {
        to[row][k * halves + h] = row < count ? number_of(kind, word, h) : std::nan("");
      }
    }
  }
}

struct Product {
  int n;
  Kind kind;
  float* d;
  std::uint64_t a, b;
  bool more;
  int rows, others;
  unsigned fragment[4];
};
struct Products {
  std::uint32_t block = 0;  // that they belong to
  std::vector<Product> started;
  bool begun = false, ended = false;
};
Products products[kMaxThreads];

// All that the threads of one warpgroup have started, for all of them.
void multiply(int first) {
  static Rows a, b;
  for (std::size_t p = 0; p < products[first].started.size(); ++p) {
    const Product& product = products[first].started[p];
    if (product.a == 0) {  // in registers
      for (int t = 0; t < kWarpgroup; ++t) {
        for (int e = 0; e < 4; ++e) {
          const unsigned word = products[first + t].started[p].fragment[e];
          a[t / kWarp * 16 + t % kWarp / 4 + e % 2 * 8][t % 4 + e / 2 * 4] = number_of(product.kind, word, 0);
        }
      }
    } else {
      load_rows(product.a, product.kind, kRows, product.rows, a);
    }
    load_rows(product.b, product.kind, product.n, product.others, b);
    const int depth = product.kind == Kind::tf32 ? 8 : 16;
    for (int t = 0; t < kWarpgroup; ++t) {
      float* const d = products[first + t].started[p].d;
      for (int e = 0; e < product.n / 2; ++e) {
        const int row = t / kWarp * 16 + t % kWarp / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + t % 4 * 2 + e % 2;
        double factors[kDepth][2];
        for (int k = 0; k < depth; ++k) {
          factors[k][0] = a[row][k];
          factors[k][1] = b[column][k];
        }
        d[e] = sum_cut_off(factors, depth, product.more ? d[e] : 0.0f, 25);
      }
    }
  }
}

}  // namespace

void copy_async(int bytes, const Shared<unsigned>& to, const void* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % bytes || to.address() % bytes) fail("a copy that is not aligned");
  Copy copy{to, std::vector<unsigned>(bytes / 4)};
  read_memory(from, bytes);
  std::memcpy(copy.words.data(), from, bytes);
  for (int i = 0; i < bytes / 4; ++i) to[i] = 0x49742400u;  // 1e6, until it is there
  own_copies().open.push_back(std::move(copy));
}

void copy_commit() {
  Copies& own = own_copies();
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}

void copy_wait(int groups) {
  Copies& own = own_copies();
  for (; static_cast<int>(own.groups.size()) > groups; own.groups.pop_front()) {
    for (const Copy& copy : own.groups.front()) {
      for (std::size_t i = 0; i < copy.words.size(); ++i) copy.to[static_cast<std::int64_t>(i)] = copy.words[i];
    }
  }
}

void fence_tensor_cores() { ++copies[now().thread].fences; }
std::uint32_t fences(int thread) { return copies[thread].fences; }

unsigned address_of(const Shared<unsigned>& array) {
  matrices = array;
  return array.address();
}

void wgmma_begin() {
  Products& own = products[now().thread];
  if (own.block != block_start()) own = {block_start(), {}, false, false};  // a launch that failed may have left some
  own.begun = true;
}

void wgmma(int n, const char* types, float* d, std::uint64_t a, std::uint64_t b, bool more, int rows, int others) {
  Products& own = products[now().thread];
  if (!own.begun) fail("products of a warpgroup that has not begun");
  own.started.push_back({n, kind_of(types), d, a, b, more && !own.started.empty(), rows, others});
  std::fill_n(d, n / 2, 1e6f);
}

void wgmma(int n, const char* types, float* d, const unsigned* a, std::uint64_t b, bool more, int others) {
  wgmma(n, types, d, 0, b, more, kRows, others);
  std::copy_n(a, 4, products[now().thread].started.back().fragment);
}

void wgmma_end() { products[now().thread].ended = true; }

void wgmma_wait(const char* file, int line) {
  const int thread = now().thread, first = thread / kWarpgroup * kWarpgroup;
  if (!products[thread].ended) fail("products of a warpgroup that are waited for and have not ended");
  gather([&] { multiply(first); }, file, line);
  products[thread] = {block_start(), {}, false, false};
}

}  // namespace simt
