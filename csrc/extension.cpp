// SPDX-License-Identifier: Apache-2.0
// The only file that sees torch: unwraps tensors, picks stream and device, and registers the kernels for the ops whose
// schemas fl_lightning/ops/_library.py defines. Shapes and dtypes were checked there.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <Python.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "ops.h"

#ifdef FL_LIGHTNING_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace fl_lightning {
namespace {

using at::Tensor;

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble:
      return DType::f64;
    case at::kFloat:
      return DType::f32;
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    default:
      TORCH_CHECK_TYPE(false, "rows must be float64, float32, float16 or bfloat16, found ", t.scalar_type());
  }
}

CountType count_type_of(const Tensor& t) {
  return t.scalar_type() == at::kByte ? CountType::u8 : t.scalar_type() == at::kShort ? CountType::i16 : CountType::i32;
}

// Columns must be contiguous, rows may be apart: a slice of a larger matrix is used where it lies.
Tensor columns_contiguous(const Tensor& t) {
  const bool usable = t.dim() == 1 ? t.is_contiguous() : (t.size(1) <= 1 || t.stride(1) == 1) && t.stride(0) >= 0;
  return usable ? t : t.contiguous();
}

Matrix matrix_of(const Tensor& t) {
  if (t.dim() == 1) return {t.const_data_ptr(), 1, t.size(0), t.size(0), dtype_of(t)};
  return {t.const_data_ptr(), t.size(0), t.size(1), t.stride(0), dtype_of(t)};
}

Layers layers_of(const Tensor& offsets, int64_t columns) {
  const int64_t* first = offsets.const_data_ptr<int64_t>();
  const int64_t count = offsets.size(0) - 1;
  bool rising = first[0] == 0 && first[count] == columns;
  for (int64_t i = 0; i < count; ++i) rising = rising && first[i] <= first[i + 1];
  TORCH_CHECK_VALUE(rising, "offsets must rise from 0 to n = ", columns, " without decreasing, found ", offsets);
  return {first, count};
}

Tensor float64(const Tensor& like, at::IntArrayRef shape) { return at::empty(shape, like.options().dtype(at::kDouble)); }

void check_order(const Tensor& order) {
  if (!order.is_cpu()) return;
  const auto m = order.size(0);
  const bool fine = std::get<0>(order.sort()).equal(at::arange(m, order.options()));
  TORCH_CHECK_VALUE(fine, "order must be a permutation of 0..", m - 1, ", found ", order);
}

void check_weights(const Tensor& weights) {
  if (!weights.is_cpu()) return;
  TORCH_CHECK_VALUE(weights.gt(0).all().item<bool>(), "weights must be positive, found ", weights);
}

// One set of wrappers serves both devices: Device supplies the kernels, and what they need besides their arguments.
template <class Device>
struct Kernels {
  static Tensor layer_gram(const Tensor& rows_in, const Tensor& offsets_in) {
    const Device device(rows_in);
    const Tensor rows = columns_contiguous(rows_in), offsets = offsets_in.contiguous();
    const Layers layers = layers_of(offsets, rows.size(1));
    Tensor gram = float64(rows, {layers.count, rows.size(0), rows.size(0)});
    device.layer_gram(matrix_of(rows), layers, gram.mutable_data_ptr<double>());
    return gram;
  }

  static Tensor layer_cross_gram(const Tensor& rows_in, const Tensor& others_in, const Tensor& offsets_in) {
    const Device device(rows_in);
    const Tensor rows = columns_contiguous(rows_in), others = columns_contiguous(others_in);
    const Tensor offsets = offsets_in.contiguous();
    const Layers layers = layers_of(offsets, rows.size(1));
    Tensor gram = float64(rows, {layers.count, rows.size(0), others.size(0)});
    device.layer_cross_gram(matrix_of(rows), matrix_of(others), layers, gram.mutable_data_ptr<double>());
    return gram;
  }

  static Tensor layer_dots(const Tensor& rows_in, const Tensor& step_in, const Tensor& offsets_in) {
    const Device device(rows_in);
    const Tensor rows = columns_contiguous(rows_in), step = step_in.to(rows.scalar_type()).contiguous();
    const Tensor offsets = offsets_in.contiguous();
    const Layers layers = layers_of(offsets, rows.size(1));
    Tensor dots = float64(rows, {layers.count, rows.size(0)});
    device.layer_dots(matrix_of(rows), step.const_data_ptr(), layers, dots.mutable_data_ptr<double>());
    return dots;
  }

  static Tensor layer_combine(const Tensor& rows, const Tensor& offsets, const Tensor& coeff) {
    Tensor step = at::empty({rows.size(1)}, rows.options());
    combine(rows, offsets, coeff, step, false);
    return step;
  }

  static void layer_combine_add(Tensor out, const Tensor& rows, const Tensor& offsets, const Tensor& coeff) {
    Tensor target = out.is_contiguous() ? out : out.contiguous();
    combine(rows, offsets, coeff, target, true);
    if (!target.is_same(out)) out.copy_(target);
  }

  static void combine(const Tensor& rows_in, const Tensor& offsets_in, const Tensor& coeff_in, Tensor& out, bool add) {
    const Device device(rows_in);
    const Tensor rows = columns_contiguous(rows_in), offsets = offsets_in.contiguous();
    const Tensor coeff = coeff_in.to(rows.device(), at::kDouble).contiguous();
    const Layers layers = layers_of(offsets, rows.size(1));
    device.layer_combine(matrix_of(rows), layers, coeff.const_data_ptr<double>(), out.mutable_data_ptr(), add);
  }

  static Tensor project_conflicts(const Tensor& gram_in, const Tensor& order_in, const Tensor& keep_in) {
    check_order(order_in);
    const Device device(gram_in);
    const Tensor gram = gram_in.contiguous(), order = order_in.to(gram.device()).contiguous();
    const Tensor keep = keep_in.to(gram.device()).contiguous();
    Tensor coeff = at::empty_like(gram);
    device.project_conflicts(gram.const_data_ptr<double>(), gram.size(0), gram.size(1), order.const_data_ptr<int64_t>(),
                             keep.const_data_ptr<bool>(), coeff.mutable_data_ptr<double>());
    return coeff;
  }

  static std::tuple<Tensor, Tensor> min_norm(const Tensor& gram_in) {
    const Device device(gram_in);
    const Tensor gram = gram_in.contiguous();
    Tensor lam = float64(gram, {gram.size(0), gram.size(1)}), gap = float64(gram, {gram.size(0)});
    device.min_norm(gram.const_data_ptr<double>(), gram.size(0), gram.size(1), lam.mutable_data_ptr<double>(),
                    gap.mutable_data_ptr<double>());
    return {lam, gap};
  }

  static std::tuple<Tensor, Tensor> puc_track(const Tensor& row_in, Tensor counts, int64_t threshold,
                                              int64_t participations, const Tensor& offsets_in) {
    const Device device(row_in);
    const Tensor row = row_in.contiguous(), offsets = offsets_in.contiguous();
    const Layers layers = layers_of(offsets, row.size(0));
    Tensor own = counts.is_contiguous() ? counts : counts.contiguous();
    Tensor keep = at::empty({(row.size(0) + 31) / 32}, row.options().dtype(at::kInt));
    Tensor norms = float64(row, {layers.count});
    device.puc_track(matrix_of(row), own.mutable_data_ptr(), count_type_of(own), threshold, participations, layers,
                     keep.mutable_data_ptr<int32_t>(), norms.mutable_data_ptr<double>());
    if (!own.is_same(counts)) counts.copy_(own);
    return {keep, norms};
  }

  static Tensor puc_combine(const Tensor& rows_in, const Tensor& keep_in, const Tensor& weights_in) {
    check_weights(weights_in);
    const Device device(rows_in);
    const Tensor rows = columns_contiguous(rows_in), keep = keep_in.contiguous();
    const Tensor weights = weights_in.to(rows.device(), at::kDouble).contiguous();
    Tensor step = at::empty({rows.size(1)}, rows.options());
    device.puc_combine(matrix_of(rows), keep.const_data_ptr<int32_t>(), weights.const_data_ptr<double>(),
                       step.mutable_data_ptr());
    return step;
  }
};

// Forwards every kernel with one more argument, `last`.
#define FL_LIGHTNING_FORWARD(space, last)                                                                       \
  template <class... A> void layer_gram(A... a) const { space::layer_gram(a..., last); }                       \
  template <class... A> void layer_cross_gram(A... a) const { space::layer_cross_gram(a..., last); }           \
  template <class... A> void layer_dots(A... a) const { space::layer_dots(a..., last); }                       \
  template <class... A> void layer_combine(A... a) const { space::layer_combine(a..., last); }                 \
  template <class... A> void project_conflicts(A... a) const { space::project_conflicts(a..., last); }         \
  template <class... A> void min_norm(A... a) const { space::min_norm(a..., last); }                           \
  template <class... A> void puc_track(A... a) const { space::puc_track(a..., last); }                         \
  template <class... A> void puc_combine(A... a) const { space::puc_combine(a..., last); }

struct OnCpu {
  explicit OnCpu(const Tensor&) {}
  static void parallel(int64_t tasks, cpu::Body body, void* context) {
    at::parallel_for(0, tasks, 1, [=](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) body(task, context);
    });
  }
  FL_LIGHTNING_FORWARD(cpu, &OnCpu::parallel)
};

#ifdef FL_LIGHTNING_CUDA
class OnCuda {
 public:
  explicit OnCuda(const Tensor& t) : guard_(t.device()), options_(t.options().dtype(at::kByte)) {}
  FL_LIGHTNING_FORWARD(cuda, context())

 private:
  // The caching allocator reuses a freed block only for work queued later on the same stream.
  static void* allocate(int64_t bytes, void* owner) {
    auto* self = static_cast<OnCuda*>(owner);
    self->scratch_.push_back(at::empty({bytes}, self->options_));
    return self->scratch_.back().mutable_data_ptr();
  }
  cuda::Context context() const {
    return {c10::cuda::getCurrentCUDAStream().stream(), &OnCuda::allocate, const_cast<OnCuda*>(this)};
  }
  c10::cuda::CUDAGuard guard_;
  at::TensorOptions options_;
  std::vector<Tensor> scratch_;
};
#endif

template <class Device>
void register_kernels(torch::Library& library) {
  using K = Kernels<Device>;
  library.impl("layer_gram", &K::layer_gram);
  library.impl("layer_cross_gram", &K::layer_cross_gram);
  library.impl("layer_dots", &K::layer_dots);
  library.impl("layer_combine", &K::layer_combine);
  library.impl("layer_combine_add", &K::layer_combine_add);
  library.impl("project_conflicts", &K::project_conflicts);
  library.impl("min_norm", &K::min_norm);
  library.impl("puc_track", &K::puc_track);
  library.impl("puc_combine", &K::puc_combine);
}

TORCH_LIBRARY_IMPL(fl_lightning, CPU, library) { register_kernels<OnCpu>(library); }
#ifdef FL_LIGHTNING_CUDA
TORCH_LIBRARY_IMPL(fl_lightning, CUDA, library) { register_kernels<OnCuda>(library); }
#endif

PyObject* instruction_set(PyObject*, PyObject*) { return PyUnicode_FromString(cpu::instruction_set()); }

PyMethodDef methods[] = {
    {"instruction_set", instruction_set, METH_NOARGS, "Instruction set that the CPU kernels use."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace fl_lightning

// Importing the module loads the library, whose static initialisers register the kernels.
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&fl_lightning::module); }
