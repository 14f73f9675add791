// SPDX-License-Identifier: Apache-2.0
// Small kernels with known faults, to show that the harness finds them. Each doubles numbers through shared memory.
#include <exception>
#include <string>

#include "include/cuda_runtime.h"

namespace {

constexpr int kThreads = 64, kRounds = 3;

enum class Fault : int {
  none,
  missing_barrier_before_read,
  missing_barrier_before_write,
  missing_warp_barrier,
  wrong_shuffle_mask,
  partial_warp_at_shuffle,
  exited_thread_at_barrier,
  two_barriers_at_once,
  read_of_nothing,
  outside_of_the_array,
  two_writers,
  too_much_shared_memory,
  half_a_warpgroup,
  copy_that_is_not_aligned,
  device_memory_without_barrier,
  device_memory_written_while_read,
  device_memory_of_another_block,
  device_memory_that_nobody_wrote,
  outside_of_device_memory,
  input_that_is_written,
};

void faulty(Fault fault, const double* in, double* out) {
  const int t = threadIdx.x;
  SHARED(double, numbers, kThreads);
  if (fault == Fault::too_much_shared_memory) {
    SHARED(double, large, 6200);
    large[t] = 0.0;
  }
  if (fault == Fault::half_a_warpgroup) {
    float sums[20];
    WGMMA_BEGIN(sums);
    WGMMA(40, "k8", "tf32.tf32", "", sums, 0, 0, false, 0, 0);
    WGMMA_END(sums);
    WGMMA_WAIT(sums);
  }
  if (fault == Fault::copy_that_is_not_aligned) {
    SHARED(unsigned, words, 4);
    COPY_ASYNC_16(words, in + 1);
  }
  if (fault == Fault::exited_thread_at_barrier && t == 7) return;
  double value = in[t];
  for (int round = 0; round < kRounds; ++round) {
    if (fault != Fault::read_of_nothing || t != 5) numbers[t] = value;
    if (fault == Fault::two_writers && t == 9) numbers[8] = value;
    if (fault == Fault::two_barriers_at_once && t >= 32) {
      __syncthreads();
    } else if (fault != Fault::missing_barrier_before_read) {
      __syncthreads();
    }
    value = 2 * numbers[(t + 33) % kThreads + (fault == Fault::outside_of_the_array && t == 63 ? 32 : 0)];
    if (fault != Fault::missing_barrier_before_write) __syncthreads();
    numbers[t] = value;  // to its neighbour in the warp, and back
    if (fault != Fault::missing_warp_barrier) __syncwarp();
    const double other = numbers[t ^ 1];
    __syncwarp();
    const unsigned mask = fault == Fault::wrong_shuffle_mask ? 0xffffu : 0xffffffffu;
    if (fault != Fault::partial_warp_at_shuffle || t != 3) value = __shfl_xor_sync(mask, other, 1);
    __syncthreads();
  }
  if (fault == Fault::device_memory_that_nobody_wrote) value += out[t];
  if (fault == Fault::outside_of_device_memory) value += in[t + 1];
  if (fault == Fault::input_that_is_written) const_cast<double*>(in)[t] = value;
  if (t / 32u != blockIdx.x && fault != Fault::device_memory_of_another_block) return;
  out[t] = value;
  if (fault == Fault::device_memory_without_barrier) out[t] = value + out[t ^ 1];
  __syncwarp();
  if (fault == Fault::device_memory_written_while_read) out[t] = out[t ^ 1];
}

}  // namespace

extern "C" const char* simt_fault(int fault, const double* in, double* out) {
  static std::string message;
  message.clear();
  try {
    const auto body = [&] { faulty(static_cast<Fault>(fault), in, out); };
    simt::run(2, kThreads, std::ref(body));
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}
