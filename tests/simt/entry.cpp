// SPDX-License-Identifier: Apache-2.0
// The kernels' host functions for ctypes. Each returns "" or what went wrong.
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "../../csrc/ops.h"
#include "include/cuda_runtime.h"

using fl_lightning::CountType;
using fl_lightning::DType;
using fl_lightning::Layers;
using fl_lightning::Matrix;

namespace {

// Scratch memory as a device gives it: aligned, and full of what somebody left there (here NaNs).
class Scratch {
 public:
  fl_lightning::cuda::Context context() { return {nullptr, &Scratch::allocate, this}; }

 private:
  static void* allocate(std::int64_t bytes, void* owner) {
    auto& blocks = static_cast<Scratch*>(owner)->blocks_;
    blocks.emplace_back((bytes + 15) / 8, ~std::uint64_t{0});
    auto* data = blocks.back().data();
    data += reinterpret_cast<std::uintptr_t>(data) % 16 ? 1 : 0;
    simt::add_memory("scratch", data, 1, bytes, bytes, 4, simt::Access::output);
    return data;
  }
  std::vector<std::vector<std::uint64_t>> blocks_;
};

template <class Call>
const char* guarded(Call call) {
  static std::string message;
  try {
    Scratch scratch;
    call(scratch.context());
    return "";
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

namespace cuda = fl_lightning::cuda;
using Context = cuda::Context;
using I64 = std::int64_t;

extern "C" {

void simt_capable(int major) { simt_capability = major; }
void simt_drive(int version) { simt_driver = version; }
int simt_launched() { return std::exchange(simt_launches, 0); }
int simt_shared_bytes() { return static_cast<int>(simt::launch_bytes()); }
void simt_memory(const void* begin, I64 rows, I64 row_bytes, I64 stride, int element, int access) {
  simt::add_memory(access ? "output" : "input", begin, rows, row_bytes, stride, element,
                   static_cast<simt::Access>(access));
}
void simt_forget() { simt::forget_memory(); }
void simt_configure(int schedule, unsigned seed) { simt::configure(static_cast<simt::Schedule>(schedule), seed); }

const char* layer_gram(Matrix rows, Layers layers, double* gram) {
  return guarded([&](Context context) { cuda::layer_gram(rows, layers, gram, context); });
}
const char* layer_squares(Matrix rows, Layers layers, double* squares) {
  return guarded([&](Context context) { cuda::layer_squares(rows, layers, squares, context); });
}
const char* layer_cross_gram(Matrix rows, Matrix others, Layers layers, double* gram) {
  return guarded([&](Context context) { cuda::layer_cross_gram(rows, others, layers, gram, context); });
}
const char* layer_dots(Matrix rows, const void* step, Layers layers, double* dots) {
  return guarded([&](Context context) { cuda::layer_dots(rows, step, layers, dots, context); });
}
const char* layer_combine(Matrix rows, Layers layers, const double* coeff, void* out, bool add) {
  return guarded([&](Context context) { cuda::layer_combine(rows, layers, coeff, out, add, context); });
}
const char* layer_cross_combine(Matrix rows, Matrix others, Layers layers, const double* coeff, void* out) {
  return guarded([&](Context context) { cuda::layer_cross_combine(rows, others, layers, coeff, out, context); });
}
const char* layer_combine_mixed(Matrix rows, Layers layers, const double* coeff, void* out, int type) {
  return guarded(
      [&](Context context) { cuda::layer_combine_mixed(rows, layers, coeff, out, static_cast<DType>(type), context); });
}
const char* copy_in(const void* host, I64 bytes, void* to) {
  return guarded([&](Context context) { cuda::copy_in("copy_in", host, bytes, to, context); });
}
const char* project_conflicts(const double* gram, I64 batch, I64 m, const I64* order, const bool* keep, double* coeff) {
  return guarded([&](Context context) { cuda::project_conflicts(gram, batch, m, order, keep, coeff, context); });
}
const char* min_norm(const double* gram, I64 batch, I64 k, double* lam, double* gap) {
  return guarded([&](Context context) { cuda::min_norm(gram, batch, k, lam, gap, context); });
}
const char* common_descent(const double* gram, const double* scale, const double* weights, I64 batch, I64 k, I64 online,
                           const double* bounds, double* coeff, bool* solved, bool* fair) {
  const fl_lightning::Descent descent{online, weights, bounds[0], bounds[1], bounds[2]};
  return guarded(
      [&](Context context) { cuda::common_descent(descent, gram, scale, batch, k, coeff, solved, fair, context); });
}
const char* puc_track(Matrix row, void* counts, int type, I64 threshold, I64 participations, Layers layers,
                      std::int32_t* keep, double* norms) {
  return guarded([&](Context context) {
    cuda::puc_track(row, counts, static_cast<CountType>(type), threshold, participations, layers, keep, norms, context);
  });
}
const char* puc_combine(Matrix rows, const std::int32_t* keep, const double* weights, void* out) {
  return guarded([&](Context context) { cuda::puc_combine(rows, keep, weights, out, context); });
}
const char* trimmed_mean(Matrix rows, I64 trim, void* out) {
  return guarded([&](Context context) { cuda::trimmed_mean(rows, trim, out, context); });
}

}  // extern "C"
