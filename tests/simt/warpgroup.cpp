// SPDX-License-Identifier: Apache-2.0
// Hopper's tensor cores on the processor, and the copies to shared memory that feed them.
//
// Which thread holds which element: PTX ISA, "Register Fragments and Shared Memory Matrix Layouts for wgmma". Where B
// lies is decoded from the descriptor as the hardware does: K-major, in patterns of 8 rows of 128 bytes, whose runs of
// 16 bytes change places by the address's bits 7 to 9. Sums are cut off as mma.cpp says of the H100: the products of 8
// columns at once, 25 bits below the leading one, then to 24 bits.
#include <algorithm>
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

double number(unsigned word) { return __uint_as_float(word & 0xffffe000u); }

// B of one instruction: n rows of 8 columns.
void load_rows(std::uint64_t descriptor, int n, double (&rows)[256][8]) {
  const auto field = [&](int first, int bits) {
    return static_cast<unsigned>(descriptor >> first & ((std::uint64_t{1} << bits) - 1));
  };
  const unsigned start = field(0, 14) << 4, distance = field(32, 14) << 4;
  if (field(62, 2) != 1) fail("a descriptor of rows that are not 128 bytes");
  if (field(49, 3) != 0 || start & 0x380u) fail("a descriptor of rows within a pattern of 1024 bytes");
  for (int row = 0; row < n; ++row) {
    for (int k = 0; k < 8; ++k) {
      const unsigned address = start + row / 8 * distance + row % 8 * 128 + k * 4;
      rows[row][k] = number(matrices.seen_by_tensor_cores(address ^ (address >> 7 & 7u) << 4));
    }
  }
}

unsigned fragments[kMaxThreads][16];
float results[kMaxThreads][128];

// The four products of one warpgroup, for all its threads.
void multiply(int first, int n, std::uint64_t x, std::uint64_t y) {
  static double a[4][64][8], b[2][256][8];
  for (int t = 0; t < kWarpgroup; ++t) {
    for (int e = 0; e < 16; ++e) {
      const int row = t / kWarp * 16 + t % kWarp / 4 + e % 2 * 8, k = t % 4 + e % 4 / 2 * 4;
      a[e / 4][row][k] = number(fragments[first + t][e]);
    }
  }
  load_rows(x, n, b[0]);
  load_rows(y, n, b[1]);
  for (int t = 0; t < kWarpgroup; ++t) {
    for (int e = 0; e < n / 2; ++e) {
      const int row = t / kWarp * 16 + t % kWarp / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + t % 4 * 2 + e % 2;
      float sum = 0.0f;
      for (int step = 0; step < 4; ++step) {
        double factors[8][2];
        for (int k = 0; k < 8; ++k) {
          factors[k][0] = a[step][row][k];
          factors[k][1] = b[step % 2][column][k];
        }
        sum = sum_cut_off(factors, 8, sum, 25);
      }
      results[first + t][e] = sum;
    }
  }
}

}  // namespace

void copy_async(int bytes, const Shared<unsigned>& to, const void* from, bool any) {
  if (reinterpret_cast<std::uintptr_t>(from) % bytes || to.address() % bytes) fail("a copy that is not aligned");
  Copy copy{to, std::vector<unsigned>(bytes / 4)};
  if (any) read_memory(from, bytes);
  if (any) std::memcpy(copy.words.data(), from, bytes);
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

void wgmma(int n, float* d, const unsigned (&a)[16], std::uint64_t x, std::uint64_t y, const char* file, int line) {
  const int thread = now().thread, first = thread / kWarpgroup * kWarpgroup;
  std::copy_n(a, 16, fragments[thread]);
  gather([&] { multiply(first, n, x, y); }, file, line);
  std::copy_n(results[thread], n / 2, d);
}

}  // namespace simt
