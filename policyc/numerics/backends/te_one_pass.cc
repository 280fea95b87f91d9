// An XLA FFI call of Transformer Engine's NVFP4 quantizer that writes rows, and rotated columns, in one pass.
//
// Built by te_one_pass.py. Its symbols come from libtransformer_engine.so, which is in the process already.

#include <transformer_engine/hadamard_transform.h>
#include <transformer_engine/transformer_engine.h>

#include <exception>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using transformer_engine::DType;
using transformer_engine::QuantizationConfigWrapper;
using transformer_engine::TensorWrapper;
using Shape = std::vector<size_t>;
using Matrix = ffi::Buffer<ffi::BF16, 2>;
using Floats = ffi::Buffer<ffi::F32>;
using Words = ffi::Buffer<ffi::U32>;
using Output = ffi::AnyBuffer;

// x: (tokens, features). Results: (tokens, features) and (features, tokens) of 4 bits, and a scale for each 16 of them.
// Maxima are those that the results are scaled by. `state` is the seed and the offset of the generator, 64 bits each.
static ffi::Error Quantize(cudaStream_t stream, Matrix x, Floats amax, Floats rotated_amax, Words state,
                           Matrix rotation, ffi::Result<Output> rows, ffi::Result<Output> columns,
                           ffi::Result<Output> row_scales, ffi::Result<Output> column_scales,
                           bool stochastic_rounding) {
  const size_t tokens = x.dimensions()[0], features = x.dimensions()[1];
  if (tokens % 64 != 0 || features % 128 != 0) {
    return ffi::Error::InvalidArgument("needs a multiple of 64 tokens and of 128 features");
  }
  if (stochastic_rounding && state.size_bytes() != 2 * sizeof(int64_t)) {
    return ffi::Error::InvalidArgument("the state of the generator must have four words");
  }
  try {
    TensorWrapper input(x.untyped_data(), Shape{tokens, features}, DType::kBFloat16);
    TensorWrapper matrix(rotation.untyped_data(), Shape{16, 16}, DType::kBFloat16);
    TensorWrapper generator(state.untyped_data(), Shape{2}, DType::kInt64);
    TensorWrapper output(NVTE_NVFP4_1D_SCALING);
    output.set_rowwise_data(rows->untyped_data(), DType::kFloat4E2M1, Shape{tokens, features});
    output.set_rowwise_scale_inv(row_scales->untyped_data(), DType::kFloat8E4M3, Shape{tokens, features / 16});
    output.set_amax(amax.untyped_data(), DType::kFloat32, Shape{1});
    output.set_columnwise_data(columns->untyped_data(), DType::kFloat4E2M1, Shape{features, tokens});
    output.set_columnwise_scale_inv(column_scales->untyped_data(), DType::kFloat8E4M3, Shape{features, tokens / 16});
    output.set_columnwise_amax(rotated_amax.untyped_data(), DType::kFloat32, Shape{1});
    QuantizationConfigWrapper config;
    config.set_stochastic_rounding(stochastic_rounding);
    if (stochastic_rounding) config.set_rng_state(generator.data());
    nvte_quantize_with_hadamard_transform(input.data(), output.data(), matrix.data(), config, stream);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PolicycTeQuantize, Quantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Matrix>()  // x
                                  .Arg<Floats>()  // amax
                                  .Arg<Floats>()  // rotated_amax
                                  .Arg<Words>()   // state
                                  .Arg<Matrix>()  // rotation
                                  .Ret<Output>()  // rows
                                  .Ret<Output>()  // columns
                                  .Ret<Output>()  // row_scales
                                  .Ret<Output>()  // column_scales
                                  .Attr<bool>("stochastic_rounding"),
                              {ffi::Traits::kCmdBufferCompatible});
