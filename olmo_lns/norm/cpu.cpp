// scale * LayerNorm(x) and scale * RMSNorm(x) on CPU: one pass over memory each way, the factor for nothing.
//
// Input and parameters of one dtype, fp32 or bf16; statistics, products and sums in fp32. What is not taken (other
// dtypes, autocast, tensor subclasses, functorch, dispatch modes, tracing) it hands back: `norm` returns None.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "cpu_rows.h"

namespace {

using namespace olmo_lns;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Buffer = std::unique_ptr<float[]>;

// ---- Tensors: contiguous, of one dtype.

// As many parts as there are threads with enough to do.
int64_t parts_of(int64_t rows, int64_t width) {
  if (at::in_parallel_region()) return 1;
  const int64_t worth = std::max<int64_t>(1, rows * width / at::internal::GRAIN_SIZE);
  return std::min({int64_t(at::get_num_threads()), worth, rows});
}

template <typename Body>  // body(part, first row, last row)
void in_parts(int64_t parts, int64_t rows, const Body& body) {
  if (parts == 1) return body(0, 0, rows);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; part++) body(part, part * rows / parts, (part + 1) * rows / parts);
  });
}

// As `like`, contiguous, without the dispatcher: three of these in a small norm are a tenth of its time.
Tensor empty(const Tensor& like) { return at::detail::empty_cpu(like.sizes(), like.scalar_type()); }

template <typename T>
const T* read(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
T* write(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Of a parameter, or of ones.
template <typename T>
Buffer scaled(const Tensor& parameter, int64_t width, float scale, float offset) {
  Buffer found(new float[width]);
  float* to = found.get();
  if (parameter.defined()) {
    const T* values = read<T>(parameter);
    fill(to, width, [=](int64_t i) { return scale * (widened(values[i]) + offset); });
  } else {
    std::fill_n(to, width, scale);
  }
  return found;
}

template <typename Row>
Buffer for_rows(int64_t count, int64_t width) {
  return Buffer(std::is_same_v<Row, Buffered> ? new float[count * width] : nullptr);
}

template <typename Row>
void forward_rows(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, float* kept,
                  const Norm& norm) {
  using T = typename Row::Element;
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const Buffer gain = scaled<T>(weight, width, norm.scale, norm.offset);
  const Buffer shift = bias.defined() ? scaled<T>(bias, width, norm.scale, 0) : nullptr;
  const T* from = read<T>(x);
  T* to = write<T>(y);
  in_parts(parts_of(rows, width), rows, [&](int64_t, int64_t first, int64_t last) {
    const Buffer buffer = for_rows<Row>(1, width);
    float ignored[2];
    for (int64_t row = first; row < last; row++) {
      forward_row(Row(from + row * width, buffer.get()), gain.get(), shift.get(), to + row * width,
                  kept ? kept + 2 * row : ignored, width, norm);
    }
  });
}

// Rows are summed in blocks first: one chain over all of them would round more.
constexpr int64_t BLOCK = 256;

template <typename Row>
void backward_rows(const Tensor& dy, const Tensor& x, const Tensor& weight, const float* kept, const Tensor& dx,
                   const Tensor& dweight, const Tensor& dbias, const Norm& norm) {
  using T = typename Row::Element;
  const int64_t width = x.size(-1), rows = x.numel() / width, parts = parts_of(rows, width);
  const Buffer gain = scaled<T>(weight, width, norm.scale, norm.offset);
  const int64_t sums = (int64_t(dweight.defined()) + int64_t(dbias.defined())) * width;
  const Buffer totals(new float[parts * sums]());
  const T *grad = read<T>(dy), *from = read<T>(x);
  T* to = dx.defined() ? write<T>(dx) : nullptr;
  in_parts(parts, rows, [&](int64_t part, int64_t first, int64_t last) {
    const Buffer buffer = for_rows<Row>(2, width);
    const bool in_blocks = last - first > BLOCK;
    const Buffer block(in_blocks ? new float[sums]() : nullptr);
    float* total = totals.get() + part * sums;
    float* sum = in_blocks ? block.get() : total;
    for (int64_t row = first; row < last; row++) {
      backward_row(Row(grad + row * width, buffer.get()), Row(from + row * width, buffer.get() + width), gain.get(),
                   kept + 2 * row, to ? to + row * width : nullptr, dweight.defined() ? sum : nullptr,
                   dbias.defined() ? sum + sums - width : nullptr, width, norm);
      if (in_blocks && ((row - first) % BLOCK == BLOCK - 1 || row == last - 1)) {
        for (int64_t i = 0; i < sums; i++) total[i] += block[i], block[i] = 0;
      }
    }
  });
  const float* first = totals.get();
  for (const Tensor* gradient : {&dweight, &dbias}) {
    if (!gradient->defined()) continue;
    fill(write<T>(*gradient), width, [&](int64_t i) {
      float total = 0;
      for (int64_t part = 0; part < parts; part++) total += first[part * sums + i];
      return norm.scale * total;
    });
    first += width;
  }
}

template <typename Function>
Function* for_row_of(const Tensor& x, Function* fp32, Function* bf16, Function* bf16_short) {
  return x.scalar_type() == at::kFloat ? fp32 : x.size(-1) > SHORT ? bf16 : bf16_short;
}

Tensor run_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, float* kept, const Norm& norm) {
  const auto rows = x.contiguous();
  const Tensor y = empty(rows);
  const auto run =
      for_row_of(rows, &forward_rows<InPlace<float>>, &forward_rows<InPlace<Bf16>>, &forward_rows<Buffered>);
  run(rows, weight, bias, y, kept, norm);
  return y;
}

// ---- Autograd.

bool plain(const Tensor& t, at::ScalarType dtype) {
  return t.device().is_cpu() && t.scalar_type() == dtype && t.layout() == at::kStrided && !t.is_neg() &&
         !t._is_zerotensor() && !t._fw_grad(0).defined() && !at::isTensorSubclassLike(t);
}

// The gradients for x, weight and bias out of torch's own operations: where they are to be differentiated in their turn,
// and for gradients that are not plain. Not by differentiating the definition here: that would follow what the tensors
// were made of too, which may be each other.
variable_list gradients(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& dy, const Norm& norm) {
  const auto wide = x.to(at::kFloat), grad = dy.to(at::kFloat);
  const auto centred = norm.centered ? wide - wide.mean(-1, true) : wide;
  const auto rstd = (centred.square().mean(-1, true) + norm.eps).rsqrt(), normed = centred * rstd;
  const auto scaled = (weight.defined() ? grad * (weight.to(at::kFloat) + norm.offset) : grad) * norm.scale;
  auto dx = scaled - normed * (scaled * normed).mean(-1, true);
  if (norm.centered) dx = dx - scaled.mean(-1, true);
  const auto summed = [&](const Tensor& each) { return each.reshape({-1, x.size(-1)}).sum(0) * norm.scale; };
  const auto dtype = x.scalar_type();
  return {(dx * rstd).to(dtype), weight.defined() ? summed(grad * normed).to(dtype) : Tensor(),
          bias.defined() ? summed(grad).to(dtype) : Tensor()};
}

// The settings travel as numbers in front of those of the rows: `saved_data` is a dictionary, which costs a tenth of a
// small norm.
constexpr int64_t SETTINGS = sizeof(Norm) / sizeof(float);

struct NormFunction : public torch::autograd::Function<NormFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::optional<Tensor>& weight,
                        const std::optional<Tensor>& bias, const Norm& norm) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor gain = weight.value_or(Tensor()), shift = bias.value_or(Tensor());
    const Tensor kept = at::detail::empty_cpu({SETTINGS + 2 * (x.numel() / x.size(-1))}, at::kFloat);
    float* first = write<float>(kept);
    std::memcpy(first, &norm, sizeof norm);
    ctx->save_for_backward({x, gain, shift, kept});
    return run_forward(x, gain, shift, first + SETTINGS, norm);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto numbers = saved[3].contiguous();
    TORCH_CHECK(numbers.scalar_type() == at::kFloat, "a hook of saved tensors gave back another dtype than it was given");
    const float* kept = read<float>(numbers);
    Norm norm;
    std::memcpy(&norm, kept, sizeof norm);
    std::array<bool, 3> wanted;  // of x, weight and bias
    for (size_t i = 0, edge = 0; i < 3; i++) wanted[i] = saved[i].defined() && ctx->needs_input_grad(edge++);
    variable_list found(4);
    const auto dtype = saved[0].scalar_type();
    bool usual = !at::GradMode::is_enabled() && plain(grads[0], dtype) && !at::areAnyTensorSubclassLike({grads[0]});
    for (const size_t i : {1, 2}) usual = usual && (!saved[i].defined() || saved[i].scalar_type() == dtype);
    if (!usual) {
      const auto each = gradients(saved[0], saved[1], saved[2], grads[0], norm);
      for (size_t i = 0; i < 3; i++) {
        if (wanted[i]) found[i] = each[i];
      }
      return found;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < 3; i++) {
      if (wanted[i]) found[i] = empty(saved[i]);
    }
    const auto rows = saved[0].contiguous(), dy = grads[0].contiguous();
    const auto gain = saved[1].defined() ? saved[1].contiguous() : saved[1];
    const auto run =
        for_row_of(rows, &backward_rows<InPlace<float>>, &backward_rows<InPlace<Bf16>>, &backward_rows<Buffered>);
    run(dy, rows, gain, kept + SETTINGS, found[0], found[1], found[2], norm);
    return found;
  }
};

// ---- What is taken.

bool parameter_of(const Tensor& t, const Tensor& x) {
  return !t.defined() || (t.dim() == 1 && t.size(0) == x.size(-1) && t.is_contiguous() && plain(t, x.scalar_type()));
}

bool takes(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const auto dtype = x.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16) && x.dim() > 0 && x.numel() > 0 && plain(x, dtype) &&
         parameter_of(weight, x) && parameter_of(bias, x) && !at::areAnyTensorSubclassLike({x}) &&
         !at::autocast::is_autocast_enabled(at::kCPU) && !torch::jit::tracer::isTracing() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

std::optional<Tensor> norm(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                           double eps, double scale, bool zero_centered, bool centered) {
  const Tensor gain = weight.value_or(Tensor()), shift = bias.value_or(Tensor());
  if (!takes(x, gain, shift)) return std::nullopt;
  RECORD_FUNCTION("olmo_lns::norm", std::vector<c10::IValue>());
  std::optional<pybind11::gil_scoped_release> released;
  if (x.numel() > at::internal::GRAIN_SIZE) released.emplace();
  const Norm settings{float(eps), float(scale), zero_centered && gain.defined() ? 1.0f : 0.0f, centered ? 1.0f : 0.0f};
  const auto wants = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
  if (at::GradMode::is_enabled() && (wants(x) || wants(gain) || wants(shift)))
    return NormFunction::apply(x, weight, bias, settings);
  at::AutoDispatchBelowADInplaceOrView below;
  return run_forward(x, gain, shift, nullptr, settings);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("norm", &norm); }
