// SPDX-License-Identifier: Apache-2.0
// Unwraps tensors, picks stream and device, and registers the kernels for the ops whose schemas
// fl_lightning/ops/_library.py defines. The public functions checked dtypes, shapes and devices; values, and sizes that
// memory safety depends on, are checked here and in tensors.h.
//
// Two libraries come of this file: fl_lightning._C has the kernels for the processor, and fl_lightning._C_cuda, which
// extension_cuda.cpp compiles with FL_LIGHTNING_CUDA, those for CUDA. So the former loads beside a torch without CUDA.
//
// Only torch's stable interface is used, so that one binary serves every torch from TORCH_TARGET_VERSION (see setup.py)
// on, and only Python's limited interface, so that it serves every Python from 3.10 on.
#include <Python.h>  // must come first

#ifdef FL_LIGHTNING_CUDA
#define USE_CUDA  // makes torch's header declare the function that tells the current stream
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "ops.h"
#include "tensors.h"

namespace fl_lightning {
namespace {

// One set of wrappers serves both devices: Device supplies the kernels, and what they need besides their arguments.
template <class Device>
struct Kernels {
  static Tensor layer_gram(const Tensor& rows_in, const Tensor& offsets_in, std::optional<int64_t> total_columns) {
    Device device(rows_in);
    const Tensor rows = with_columns_contiguous(rows_in), offsets = torch::stable::contiguous(offsets_in);
    const Matrix matrix = matrix_of(rows);
    const Layers layers = layers_of(offsets, matrix.columns, total_columns);
    Tensor gram = empty(rows, {layers.count, matrix.rows, matrix.rows}, ScalarType::Double);
    device.layer_gram(matrix, layers, write<double>(gram));
    return gram;
  }

  static Tensor layer_squares(const Tensor& rows_in, const Tensor& offsets_in, std::optional<int64_t> total_columns) {
    Device device(rows_in);
    const Tensor rows = with_columns_contiguous(rows_in), offsets = torch::stable::contiguous(offsets_in);
    const Matrix matrix = matrix_of(rows);
    const Layers layers = layers_of(offsets, matrix.columns, total_columns);
    Tensor squares = empty(rows, {layers.count, matrix.rows}, ScalarType::Double);
    device.layer_squares(matrix, layers, write<double>(squares));
    return squares;
  }

  static Tensor layer_cross_gram(const Tensor& rows_in, const Tensor& others_in, const Tensor& offsets_in,
                                 std::optional<int64_t> total_columns) {
    Device device(rows_in);
    const Tensor rows = with_columns_contiguous(rows_in), others = with_columns_contiguous(others_in, "others");
    const Tensor offsets = torch::stable::contiguous(offsets_in);
    const Matrix matrix = matrix_of(rows), other = matrix_of(others);
    require_others(others, rows);
    const Layers layers = layers_of(offsets, matrix.columns, total_columns);
    Tensor gram = empty(rows, {layers.count, matrix.rows, other.rows}, ScalarType::Double);
    device.layer_cross_gram(matrix, other, layers, write<double>(gram));
    return gram;
  }

  // Only on the processor: elsewhere all products are computed, and those that were asked for are taken.
  static Tensor layer_chosen_gram(const Tensor& rows_in, const Tensor& others_in, const Tensor& offsets_in,
                                  const Tensor& chosen_in, std::optional<int64_t> total_columns) {
    Device device(rows_in);
    const Tensor rows = with_columns_contiguous(rows_in), others = with_columns_contiguous(others_in, "others");
    const Tensor offsets = torch::stable::contiguous(offsets_in), chosen = torch::stable::contiguous(chosen_in);
    const Matrix matrix = matrix_of(rows), other = matrix_of(others);
    require_others(others, rows);
    const Layers layers = layers_of(offsets, matrix.columns, total_columns);
    require_type("chosen", chosen, ScalarType::Long);
    require(chosen.dim() == 1 && chosen.is_cpu(), "chosen must be a vector on the CPU");
    const auto *first = read<int64_t>(chosen), *last = first + chosen.numel();
    const bool within = std::all_of(first, last, [&](int64_t row) { return row >= 0 && row < other.rows; });
    if (!within) {
      require(false, "chosen must lie between 0 and ", other.rows - 1, ", found ", listed(first, last - first));
    }
    Tensor gram = empty(rows, {layers.count, matrix.rows, last - first}, ScalarType::Double);
    device.layer_chosen_gram(matrix, other, first, last - first, layers, write<double>(gram));
    return gram;
  }

  // A step of another dtype keeps its accuracy: it goes through the kernel for two matrices.
  static Tensor layer_dots(const Tensor& rows_in, const Tensor& step_in, const Tensor& offsets_in,
                           std::optional<int64_t> total_columns) {
    Device device(rows_in);
    const Tensor rows = with_columns_contiguous(rows_in), step = torch::stable::contiguous(step_in);
    const Tensor offsets = torch::stable::contiguous(offsets_in);
    const Matrix matrix = matrix_of(rows), one = vector_of(step, "step");
    require_shape("step", step, {matrix.columns});
    require_beside("step", step, rows);
    const Layers layers = layers_of(offsets, matrix.columns, total_columns);
    Tensor dots = empty(rows, {layers.count, matrix.rows}, ScalarType::Double);
    if (one.dtype == matrix.dtype) {
      device.layer_dots(matrix, one.data, layers, write<double>(dots));
    } else {
      device.layer_cross_gram(matrix, one, layers, write<double>(dots));
    }
    return dots;
  }

  static Tensor layer_combine(const Tensor& rows, const Tensor& offsets, const Tensor& coeff) {
    require(rows.dim() == 2, "rows must have shape [m, n], found ", rows.dim(), " dimensions");
    Tensor step = empty(rows, {rows.size(1)}, rows.scalar_type());
    combine(rows, offsets, coeff, step, false);
    return step;
  }

  static Tensor layer_cross_combine(const Tensor& rows_in, const Tensor& others_in, const Tensor& offsets_in,
                                    const Tensor& coeff_in) {
    Device device(rows_in);
    require(rows_in.scalar_type() == others_in.scalar_type(), "others must have the rows' dtype");
    const Tensor rows = with_columns_contiguous(rows_in), others = with_columns_contiguous(others_in, "others");
    const Tensor offsets = torch::stable::contiguous(offsets_in);
    const Matrix matrix = matrix_of(rows), other = matrix_of(others);
    require_others(others, rows);
    const Layers layers = layers_of(offsets, matrix.columns);
    require_numbers("coeff", coeff_in, {layers.count, matrix.rows + other.rows});
    const Tensor coeff = device.usable(coeff_in, ScalarType::Double);
    Tensor step = empty(rows, {matrix.columns}, rows.scalar_type());
    device.layer_cross_combine(matrix, other, layers, read<double>(coeff), step.mutable_data_ptr());
    return step;
  }

  static void layer_combine_add(Tensor out, const Tensor& rows, const Tensor& offsets, const Tensor& coeff) {
    require_some_rows(rows);
    dtype_of(out, "out");
    require_shape("out", out, {rows.size(1)});
    require_beside("out", out, rows);
    require_apart("out", out, rows);
    begin_write("out", out);
    if (out.scalar_type() != rows.scalar_type() && !Device::kMixed) return add_in_parts(out, rows, offsets, coeff);
    const Tensor target = torch::stable::contiguous(out);
    combine(rows, offsets, coeff, target, true);
    if (!out.is_contiguous()) torch::stable::copy_(out, target);
  }

  // Where the kernel adds in the rows' dtype alone: stretches of columns go through float64, to be rounded once.
  static void add_in_parts(Tensor out, Tensor rows, const Tensor& offsets_in, const Tensor& coeff) {
    const Tensor offsets = torch::stable::contiguous(offsets_in);
    const int64_t n = rows.size(1), width = std::max<int64_t>(4096, (int64_t{1} << 20) / rows.size(0));
    const Layers layers = layers_of(offsets, n);
    require_numbers("coeff", coeff, {layers.count, rows.size(0)});
    for (int64_t begin = 0; begin < n; begin += width) {
      const int64_t columns = std::min(width, n - begin);
      Tensor part = torch::stable::narrow(out, 0, begin, columns);
      const Tensor total = usable(part, ScalarType::Double);
      const Tensor some = usable(torch::stable::narrow(rows, 1, begin, columns), ScalarType::Double);
      Tensor part_offsets = empty(offsets, {layers.count + 1}, ScalarType::Long);
      for (int64_t i = 0; i <= layers.count; ++i) {
        write<int64_t>(part_offsets)[i] = std::clamp<int64_t>(layers.offsets[i] - begin, 0, columns);
      }
      combine(some, part_offsets, coeff, total, true);
      // torch's conversion goes by way of float32.
      for (int64_t c = 0; c < columns && part.element_size() == 2; ++c) {
        write<double>(total)[c] = with_14_bits(read<double>(total)[c]);
      }
      torch::stable::copy_(part, total);
    }
  }

  static void combine(const Tensor& rows_in, const Tensor& offsets_in, const Tensor& coeff_in, const Tensor& out,
                      bool add) {
    Device device(rows_in);
    const Tensor rows = with_columns_contiguous(rows_in), offsets = torch::stable::contiguous(offsets_in);
    const Matrix matrix = matrix_of(rows);
    const Layers layers = layers_of(offsets, matrix.columns);
    require_numbers("coeff", coeff_in, {layers.count, matrix.rows});
    const Tensor coeff = device.usable(coeff_in, ScalarType::Double);
    if constexpr (Device::kMixed) {
      if (const DType type = dtype_of(out, "out"); type != matrix.dtype) {
        device.layer_combine_mixed(matrix, layers, read<double>(coeff), out.mutable_data_ptr(), type);
        return;
      }
    }
    device.layer_combine(matrix, layers, read<double>(coeff), out.mutable_data_ptr(), add);
  }

  static Tensor project_conflicts(const Tensor& gram_in, const Tensor& order_in, const Tensor& keep_in) {
    require_type("gram", gram_in, ScalarType::Double);
    require(gram_in.dim() == 3 && gram_in.size(1) == gram_in.size(2), "gram must have shape [B, m, m]");
    const int64_t batch = gram_in.size(0), m = gram_in.size(1);
    check_order(order_in, m);
    require_type("keep", keep_in, ScalarType::Bool);
    require_shape("keep", keep_in, {m});
    Device device(gram_in);
    const Tensor gram = torch::stable::contiguous(gram_in), order = device.usable(order_in, ScalarType::Long);
    const Tensor keep = device.usable(keep_in, ScalarType::Bool);
    Tensor coeff = empty(gram, {batch, m, m}, ScalarType::Double);
    device.project_conflicts(read<double>(gram), batch, m, read<int64_t>(order), read<bool>(keep),
                             write<double>(coeff));
    return coeff;
  }

  static std::tuple<Tensor, Tensor> min_norm(const Tensor& gram_in) {
    require_type("gram", gram_in, ScalarType::Double);
    require(gram_in.dim() == 3 && gram_in.size(1) == gram_in.size(2), "gram must have shape [B, k, k]");
    Device device(gram_in);
    const Tensor gram = torch::stable::contiguous(gram_in);
    const int64_t batch = gram.size(0), k = gram.size(1);
    Tensor lam = empty(gram, {batch, k}, ScalarType::Double), gap = empty(gram, {batch}, ScalarType::Double);
    device.min_norm(read<double>(gram), batch, k, write<double>(lam), write<double>(gap));
    return {lam, gap};
  }

  static std::tuple<Tensor, Tensor, Tensor> common_descent(const Tensor& gram_in, int64_t online,
                                                           const std::optional<Tensor>& scale_in,
                                                           const std::optional<Tensor>& weights_in, double zero_row,
                                                           double zero_direction, double rounding) {
    require_type("gram", gram_in, ScalarType::Double);
    require(gram_in.dim() == 3 && gram_in.size(1) == gram_in.size(2), "gram must have shape [B, k, k]");
    Device device(gram_in);
    const Tensor gram = torch::stable::contiguous(gram_in);
    const int64_t batch = gram.size(0), k = gram.size(1);
    require(online >= 1 && online <= k, "online must be between 1 and ", k, ", found ", online);
    require(zero_row >= 0 && zero_direction >= 0 && rounding >= 0,
            "zero_row, zero_direction and rounding must be at least 0");
    if (scale_in) require_numbers("scale", *scale_in, {batch, k});
    if (weights_in) require_numbers("weights", *weights_in, {online});
    const auto numbers = [&](const std::optional<Tensor>& t) {
      return t ? std::optional(device.usable(*t, ScalarType::Double)) : std::nullopt;
    };
    const std::optional<Tensor> scale = numbers(scale_in), weights = numbers(weights_in);
    const Descent descent{online, weights ? read<double>(*weights) : nullptr, zero_row, zero_direction, rounding};
    Tensor coeff = empty(gram, {batch, k}, ScalarType::Double);
    Tensor solved = empty(gram, {batch}, ScalarType::Bool), fair = empty(gram, {batch}, ScalarType::Bool);
    device.common_descent(descent, read<double>(gram), scale ? read<double>(*scale) : nullptr, batch, k,
                          write<double>(coeff), write<bool>(solved), write<bool>(fair));
    return {coeff, solved, fair};
  }

  static std::tuple<Tensor, Tensor> puc_track(const Tensor& row_in, Tensor counts, int64_t threshold,
                                              int64_t participations, const Tensor& offsets_in,
                                              std::optional<int64_t> total_columns) {
    Device device(row_in);
    const Tensor row = torch::stable::contiguous(row_in), offsets = torch::stable::contiguous(offsets_in);
    const Matrix matrix = vector_of(row, "row");
    const int64_t n = matrix.columns;
    require_shape("counts", counts, {n});
    require_beside("counts", counts, row);
    const int64_t limit = largest_count(count_type_of(counts));
    require(threshold >= 0, "threshold must be at least 0, found ", threshold);
    require(participations >= 0 && participations < limit, "participations must be in 0..", limit - 1, ", found ",
            participations);
    const Layers layers = layers_of(offsets, n, total_columns);
    require_apart("counts", counts, row);
    begin_write("counts", counts);
    const Tensor own = torch::stable::contiguous(counts);
    Tensor keep = empty(row, {(n + 31) / 32}, ScalarType::Int);
    Tensor norms = empty(row, {layers.count}, ScalarType::Double);
    device.puc_track(matrix, own.mutable_data_ptr(), count_type_of(own), threshold, participations, layers,
                     write<int32_t>(keep), write<double>(norms));
    if (!counts.is_contiguous()) torch::stable::copy_(counts, own);
    return {keep, norms};
  }

  static Tensor puc_combine(const Tensor& rows_in, const Tensor& keep_in, const Tensor& weights_in) {
    require_some_rows(rows_in);
    require_numbers("weights", weights_in, {rows_in.size(0)});
    check_weights(weights_in);
    Device device(rows_in);
    const Tensor rows = with_columns_contiguous(rows_in), keep = torch::stable::contiguous(keep_in);
    const Tensor weights = device.usable(weights_in, ScalarType::Double);
    const Matrix matrix = matrix_of(rows);
    const int64_t words = (matrix.columns + 31) / 32;
    require_type("keep", keep, ScalarType::Int);
    require_shape("keep", keep, {matrix.rows, words});
    require_beside("keep", keep, rows);
    Tensor step = empty(rows, {matrix.columns}, rows.scalar_type());
    device.puc_combine(matrix, read<int32_t>(keep), read<double>(weights), step.mutable_data_ptr());
    return step;
  }

  static Tensor trimmed_mean(const Tensor& rows_in, int64_t trim) {
    Device device(rows_in);
    const Tensor rows = with_columns_contiguous(rows_in);
    const Matrix matrix = matrix_of(rows);
    require(matrix.rows > 0 && trim >= 0 && trim <= (matrix.rows - 1) / 2, "trim must be below half of the ",
            matrix.rows, " rows");
    Tensor mean = empty(rows, {matrix.columns}, rows.scalar_type());
    device.trimmed_mean(matrix, trim, mean.mutable_data_ptr());
    return mean;
  }
};

// Forwards every kernel with one more argument, `last`.
#define FL_LIGHTNING_FORWARD(space, op, last) \
  template <class... A>                       \
  void op(A... a) {                           \
    space::op(a..., last);                    \
  }
#define FL_LIGHTNING_FORWARD_ALL(space, last)            \
  FL_LIGHTNING_FORWARD(space, layer_gram, last)          \
  FL_LIGHTNING_FORWARD(space, layer_squares, last)       \
  FL_LIGHTNING_FORWARD(space, layer_cross_gram, last)    \
  FL_LIGHTNING_FORWARD(space, layer_dots, last)          \
  FL_LIGHTNING_FORWARD(space, layer_combine, last)       \
  FL_LIGHTNING_FORWARD(space, layer_cross_combine, last) \
  FL_LIGHTNING_FORWARD(space, project_conflicts, last)   \
  FL_LIGHTNING_FORWARD(space, min_norm, last)            \
  FL_LIGHTNING_FORWARD(space, common_descent, last)      \
  FL_LIGHTNING_FORWARD(space, puc_track, last)           \
  FL_LIGHTNING_FORWARD(space, puc_combine, last)         \
  FL_LIGHTNING_FORWARD(space, trimmed_mean, last)

#ifndef FL_LIGHTNING_CUDA
struct OnCpu {
  static constexpr bool kMixed = false;  // whether layer_combine adds to an out of another dtype than the rows
  explicit OnCpu(const Tensor&) {}
  static Tensor usable(const Tensor& t, ScalarType type) { return fl_lightning::usable(t, type); }
  static void parallel(int64_t tasks, cpu::Body body, void* context) {
    torch::stable::parallel_for(0, tasks, 1, [=](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) body(task, context);
    });
  }
  FL_LIGHTNING_FORWARD_ALL(cpu, &OnCpu::parallel)
  FL_LIGHTNING_FORWARD(cpu, layer_chosen_gram, &OnCpu::parallel)
};
#else
class OnCuda {
 public:
  static constexpr bool kMixed = true;
  explicit OnCuda(const Tensor& t) : device_(t.device()), guard_(device_.index()) {}
  FL_LIGHTNING_FORWARD_ALL(cuda, context())
  FL_LIGHTNING_FORWARD(cuda, layer_combine_mixed, context())
  // On this device. A few numbers from the host come without waiting for the device, and into a captured graph.
  Tensor usable(const Tensor& t, ScalarType type) {
    if (!t.is_cpu()) return fl_lightning::usable(t.device() == device_ ? t : torch::stable::to(t, device_), type);
    const Tensor host = fl_lightning::usable(t, type);
    Tensor here = torch::stable::empty(host.sizes(), type, std::nullopt, device_);
    const auto bytes = host.numel() * static_cast<int64_t>(host.element_size());
    cuda::copy_in("arguments", host.const_data_ptr(), bytes, here.mutable_data_ptr(), context());
    return here;
  }

 private:
  // The caching allocator reuses a freed block only for work queued later on the same stream.
  static void* allocate(int64_t bytes, void* owner) {
    auto* self = static_cast<OnCuda*>(owner);
    self->scratch_.push_back(torch::stable::empty({bytes}, ScalarType::Byte, std::nullopt, self->device_));
    return self->scratch_.back().mutable_data_ptr();
  }
  cuda::Context context() {
    void* stream = nullptr;
    // Of torch's macros for this check each release has its own.
    require(aoti_torch_get_current_cuda_stream(device_.index(), &stream) == AOTI_TORCH_SUCCESS,
            "torch does not tell the current stream of the CUDA device ", device_.index());
    return {stream, &OnCuda::allocate, this};
  }
  torch::stable::Device device_;
  torch::stable::accelerator::DeviceGuard guard_;
  std::vector<Tensor> scratch_;
};
#endif

template <class Device, class Library>
void register_kernels(Library& library) {
  using K = Kernels<Device>;
  library.impl("layer_gram", TORCH_BOX(&K::layer_gram));
  library.impl("layer_squares", TORCH_BOX(&K::layer_squares));
  library.impl("layer_cross_gram", TORCH_BOX(&K::layer_cross_gram));
  library.impl("layer_dots", TORCH_BOX(&K::layer_dots));
  library.impl("layer_combine", TORCH_BOX(&K::layer_combine));
  library.impl("layer_cross_combine", TORCH_BOX(&K::layer_cross_combine));
  library.impl("layer_combine_add", TORCH_BOX(&K::layer_combine_add));
  library.impl("project_conflicts", TORCH_BOX(&K::project_conflicts));
  library.impl("min_norm", TORCH_BOX(&K::min_norm));
  library.impl("common_descent", TORCH_BOX(&K::common_descent));
  library.impl("puc_track", TORCH_BOX(&K::puc_track));
  library.impl("puc_combine", TORCH_BOX(&K::puc_combine));
  library.impl("trimmed_mean", TORCH_BOX(&K::trimmed_mean));
}

#ifdef FL_LIGHTNING_CUDA
STABLE_TORCH_LIBRARY_IMPL(fl_lightning, CUDA, library) { register_kernels<OnCuda>(library); }

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
#else
STABLE_TORCH_LIBRARY_IMPL(fl_lightning, CPU, library) {
  register_kernels<OnCpu>(library);
  library.impl("layer_chosen_gram", TORCH_BOX(&Kernels<OnCpu>::layer_chosen_gram));
}

PyObject* instruction_set(PyObject*, PyObject*) { return PyUnicode_FromString(cpu::instruction_set()); }

PyMethodDef methods[] = {
    {"instruction_set", instruction_set, METH_NOARGS, "Instruction set that the CPU kernels use."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
#endif

}  // namespace
}  // namespace fl_lightning

// Importing a module loads its library, whose static initialisers register the kernels.
#ifdef FL_LIGHTNING_CUDA
PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&fl_lightning::module); }
#else
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&fl_lightning::module); }
#endif
