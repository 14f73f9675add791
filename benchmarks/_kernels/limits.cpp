// SPDX-License-Identifier: Apache-2.0
// What the machine can do at best: loops that only read, and loops that only multiply and add. Compiled where it runs,
// for the processor at hand.
#include <cstdint>
#include <cstring>
#include <ctime>

extern "C" int omp_get_thread_num();

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kSums = 24;
#elif defined(__AVX__)
constexpr int kBytes = 32, kSums = 12;
#else
constexpr int kBytes = 16, kSums = 12;
#endif
typedef std::uint64_t Words __attribute__((vector_size(kBytes)));
typedef float Floats __attribute__((vector_size(kBytes)));

volatile std::uint64_t sink;

// Of one thread the processor's time.
double now(int threads) {
  timespec time;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Runs body(thread) on all threads and returns the seconds until the last is done. They are the threads that torch
// keeps: others would fight with these for the processors.
template <class Body>
double timed(int threads, Body body) {
  const double start = now(threads);
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num());
  return now(threads) - start;
}

// Adds up all words, `streams` stretches side by side.
template <int streams>
std::uint64_t sum(const char* data, std::int64_t bytes) {
  constexpr std::int64_t step = 128, ahead = 2048;
  const std::int64_t length = bytes / streams / step * step;
  Words total[streams * step / kBytes] = {};
  for (std::int64_t i = 0; i < length; i += step) {
#pragma GCC unroll 32
    for (int s = 0; s < streams * step / kBytes; ++s) {
      const char* at = data + s / (step / kBytes) * length + i + s % (step / kBytes) * kBytes;
      if (s * kBytes % 64 == 0) __builtin_prefetch(at + ahead);
      Words words;
      std::memcpy(&words, at, kBytes);
      total[s] += words;
    }
  }
  Words all = {};
  for (const Words& part : total) all += part;
  return all[0] + all[1];
}

std::uint64_t multiply_add(std::int64_t times) {
  Floats total[kSums], factor, term;
  factor = Floats{} + 0.999f;
  term = Floats{} + 0.001f;
#pragma GCC unroll 24
  for (int s = 0; s < kSums; ++s) total[s] = Floats{} + static_cast<float>(s);
  for (std::int64_t i = 0; i < times; ++i) {
#pragma GCC unroll 24
    for (int s = 0; s < kSums; ++s) total[s] = total[s] * factor + term;
  }
  Floats all = {};
#pragma GCC unroll 24
  for (int s = 0; s < kSums; ++s) all += total[s];
  return static_cast<std::uint64_t>(all[0]);
}

}  // namespace

extern "C" {

// Seconds that reading the bytes once takes, the better of one and of four streams per thread.
double read_once(const char* data, std::int64_t bytes, int threads, int times) {
  const std::int64_t part = bytes / threads / 64 * 64;
  const auto run = [&](std::uint64_t (*loop)(const char*, std::int64_t)) {
    return timed(threads,
                 [&](int thread) {
                   for (int i = 0; i < times; ++i) sink = loop(data + thread * part, part);
                 }) /
           times;
  };
  const double one = run(sum<1>), four = run(sum<4>);
  return one < four ? one : four;
}

// Floating-point operations per second of fused multiply-adds on float32 registers, two for each.
double peak_rate(int threads) {
  constexpr std::int64_t times = 1'000'000;
  const double seconds = timed(threads, [](int) { sink = multiply_add(times); });
  return 2.0 * threads * times * kSums * kBytes / 4 / seconds;
}
}
