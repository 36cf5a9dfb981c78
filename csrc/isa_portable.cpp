#define ONESTEM_ISA portable
#include "kernels/vec_portable.h"

#include "kernels/table.h"

namespace onestem::portable {

Kernels table() {
  Kernels kernels{};
  fill<float, FloatProducts<float>>(kernels, kFloat32, {0.08f, 0.025f, 0.1f, 0.012f, 0.5f});
  fill<bf16, FloatProducts<bf16>>(kernels, kBfloat16, {0.08f, 0.03f, 0.12f, 0.012f, 0.5f});
  fill<f16, FloatProducts<f16>>(kernels, kFloat16, {0.08f, 0.03f, 0.12f, 0.012f, 0.5f});
  return kernels;
}

}  // namespace onestem::portable
