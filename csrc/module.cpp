// The Python module `onestem.ops.cpu._native`: tensors come as data pointers, checked in Python.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "driver.h"
#include "isa.h"
#include "sampling.h"
#include "threads.h"

#ifdef ONESTEM_EMULATED
#include "emulate/instructions.h"
#define ONESTEM_MODULE _emulated
#else
#define ONESTEM_MODULE _native
#endif

namespace nb = nanobind;

namespace onestem {
namespace {

template <int N>
using Ints = nb::ndarray<const int32_t, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

template <class Row, class Array>
std::vector<Row> copy_rows(const Array& array) {
  const Row* begin = reinterpret_cast<const Row*>(array.data());
  return {begin, begin + array.shape(0)};
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

const Kernels& kernels_of(const std::string& isa) {
  const Kernels* kernels = kernels_for(isa);
  if (kernels == nullptr) throw nb::value_error("unknown instruction set");
  return *kernels;
}

using Plans = std::vector<PreparedPlan*>;

// Calls of a step's layers, to be made again: of the same tensors, with plans in place of those that
// they were recorded with. The caller keeps all tensors where they are.
class Program {
 public:
  explicit Program(int32_t threads) : threads_(threads) {}
  void begin(Plans plans) {
    if (recording != nullptr) throw nb::value_error("another program is being recorded");
    plans_ = std::move(plans);
    recording = this;
  }
  void end() { recording = nullptr; }

  // Whether all slots were inside the pages.
  bool run(const Plans& plans) const {
    if (plans.size() != plans_.size()) throw nb::value_error("expected as many plans");
    nb::gil_scoped_release released;
    bool inside = true;
    with_threads(threads_, [&] {
      for (const auto& call : calls_) inside = inside && call(plans);
    });
    return inside;
  }

  // Makes a call, and records it if a program is being recorded.
  template <class Call>
  static bool perform(const Call& call) {
    if (recording != nullptr) recording->calls_.push_back([=](const Plans&) { return call(); });
    nb::gil_scoped_release released;
    return call();
  }

  template <class Call>
  static void perform(PreparedPlan& plan, const Call& call) {
    if (recording != nullptr) {
      const Plans& known = recording->plans_;
      const size_t at = std::find(known.begin(), known.end(), &plan) - known.begin();
      if (at == known.size()) throw nb::value_error("the plan is not of the program");
      recording->calls_.push_back([=](const Plans& plans) {
        call(*plans[at]);
        return true;
      });
    }
    nb::gil_scoped_release released;
    call(plan);
  }

 private:
  static inline thread_local Program* recording = nullptr;
  int32_t threads_;
  Plans plans_;
  std::vector<std::function<bool(const Plans&)>> calls_;
};

PreparedPlan* make_plan(const std::string& isa, int32_t page_size, const Ints<1>& run_pages,
                        const Ints<2>& runs, const Ints<2>& spans, const Ints<1>& row_position,
                        int32_t window, bool share, std::vector<float> costs, bool grid,
                        const std::vector<int32_t>& moved) {
  Plan plan{page_size,
            window,
            copy_rows<int32_t>(run_pages),
            copy_rows<Run>(runs),
            copy_rows<Span>(spans),
            copy_rows<int32_t>(row_position),
            moved};
  if (!costs.empty() && costs.size() != 9) throw nb::value_error("expected 9 costs");
  return new PreparedPlan(std::move(plan), {share, grid}, kernels_of(isa), std::move(costs));
}

void attend_plan(PreparedPlan& plan, int dtype, uintptr_t q, uintptr_t k, uintptr_t v,
                 std::array<int64_t, 3> strides, uintptr_t out, uintptr_t lse, int32_t q_heads,
                 int32_t kv_heads, int32_t dim, float scale, uintptr_t alibi_slopes, float softcap, int32_t threads) {
  AttentionCall call{};
  call.q = pointer<void>(q);
  call.k = pointer<void>(k);
  call.v = pointer<void>(v);
  call.pages = {strides[0], strides[1], strides[2]};
  call.out = pointer<void>(out);
  call.lse = pointer<float>(lse);
  call.q_heads = q_heads;
  call.kv_heads = kv_heads;
  call.group = q_heads / kv_heads;
  call.dim = dim;
  call.scale = scale;
  call.alibi_slopes = pointer<float>(alibi_slopes);
  call.softcap = softcap;
  Program::perform(plan, [=](PreparedPlan& of) { attend(call, of, static_cast<Dtype>(dtype), threads); });
}

// The work items: (wide, rows, first KV head, KV heads, pieces, nanoseconds, hand); pieces and hand as
// in attention.h.
nb::list describe(PreparedPlan& plan, int dtype, int32_t q_heads, int32_t kv_heads, int32_t dim,
                  int32_t threads) {
  const WorkList& work = plan.work(static_cast<Dtype>(dtype), {q_heads, kv_heads, dim}, threads);
  nb::list items;
  for (const Item& item : work.items) {
    const auto rows = work.rows.begin() + item.rows_at;
    nb::list pieces;
    for (int32_t i = item.pieces_at; i < item.pieces_at + item.num_pieces; ++i) {
      const Piece& p = work.pieces[i];
      pieces.append(nb::make_tuple(p.run, p.lo, p.hi, p.first, p.end, p.step));
    }
    items.append(nb::make_tuple(item.wide != 0, std::vector<int32_t>(rows, rows + item.num_rows),
                                item.head, item.num_heads, pieces, item.cost, static_cast<int>(item.hand)));
  }
  return items;
}

std::vector<float> default_rates(const std::string& isa, int dtype) {
  const Rates& rates = kernels_of(isa).of[dtype].rates;
  return {rates.read, rates.thin, rates.pack, rates.wide, rates.state, rates.pack_few};
}

void add_rms_norm(const std::string& isa, int dtype, uintptr_t hidden, uintptr_t delta,
                  uintptr_t weight, uintptr_t out, int64_t rows, int64_t width, float eps,
                  bool wide_weight, int32_t threads) {
  const AddRmsNormCall call{pointer<void>(hidden), pointer<void>(delta), pointer<void>(weight),
                            pointer<void>(out),    width,                eps, wide_weight};
  const auto run = kernels_of(isa).of[dtype].add_rms_norm;
  Program::perform([=] {
    over_rows(rows, rows * width * 8, threads,
              [&](int64_t begin, int64_t end) { run(call, begin, end); });
    return true;
  });
}

bool rope_write(const std::string& isa, int dtype, uintptr_t qkv, uintptr_t q_norm,
                uintptr_t k_norm, uintptr_t cos, uintptr_t sin, uintptr_t slots, uintptr_t q,
                uintptr_t k_pages, uintptr_t v_pages, std::array<int64_t, 3> strides,
                int64_t rows, int32_t q_heads, int32_t kv_heads, int32_t value_heads, int32_t dim,
                float eps, int32_t page_size, int64_t num_slots, bool wide_weights,
                bool value_norm, int32_t threads) {
  const RopeWriteCall call{pointer<void>(qkv),     pointer<void>(q_norm), pointer<void>(k_norm),
                           pointer<float>(cos),    pointer<float>(sin),   pointer<int64_t>(slots),
                           pointer<void>(q),       pointer<void>(k_pages), pointer<void>(v_pages),
                           q_heads, kv_heads, dim, value_heads, eps, page_size,
                           {strides[0], strides[1], strides[2]}, wide_weights, value_norm};
  const auto run = kernels_of(isa).of[dtype].rope_write;
  return Program::perform([=] {
    for (int64_t i = 0; i < rows; ++i) {
      if (call.slots[i] < 0 || call.slots[i] >= num_slots) return false;
    }
    over_rows(rows, rows * (q_heads + kv_heads + value_heads) * dim * 8, threads,
              [&](int64_t begin, int64_t end) { run(call, begin, end); });
    return true;
  });
}

void silu_mul(const std::string& isa, int dtype, uintptr_t gate_up, uintptr_t out, int64_t rows,
              int64_t width, int32_t threads) {
  const SiluMulCall call{pointer<void>(gate_up), pointer<void>(out), width};
  const auto run = kernels_of(isa).of[dtype].silu_mul;
  Program::perform([=] {
    over_rows(rows, rows * width * 16, threads,
              [&](int64_t begin, int64_t end) { run(call, begin, end); });
    return true;
  });
}

// Whether rows and slots of all parts are there.
bool are_inside(const Ints<2>& parts, int64_t rows, int64_t slots) {
  const Part* part = reinterpret_cast<const Part*>(parts.data());
  for (const Part* end = part + parts.shape(0); part != end; ++part) {
    if (part->count == 0) continue;
    if (part->count < 0 || part->first < 0 || rows - part->count < part->first) return false;
    if (part->source >= slots || part->target < 0 || part->target >= slots) return false;
  }
  return true;
}

bool causal_conv(const std::string& isa, int dtype, const Ints<2>& parts, uintptr_t x,
                 int64_t stride, uintptr_t weight, bool wide_weight, uintptr_t states,
                 int64_t slots, uintptr_t out, int64_t rows, int64_t channels, int32_t width,
                 int32_t threads) {
  if (!are_inside(parts, rows, slots)) return false;
  const ConvCall call{reinterpret_cast<const Part*>(parts.data()),
                      static_cast<int64_t>(parts.shape(0)),
                      pointer<void>(x),
                      stride,
                      pointer<void>(weight),
                      pointer<void>(states),
                      pointer<void>(out),
                      channels,
                      width,
                      wide_weight};
  const KernelsOf& kernels = kernels_of(isa).of[dtype];
  nb::gil_scoped_release released;
  convolve(kernels, call, rows, dtype == kFloat32 ? 4 : 2, threads);
  return true;
}

bool delta_rule(const std::string& isa, int dtype, const Ints<2>& parts,
                std::array<uintptr_t, 3> qkv, std::array<int64_t, 3> strides, uintptr_t decay,
                uintptr_t beta, uintptr_t states, int64_t slots, uintptr_t out, int64_t rows,
                std::array<int32_t, 4> sizes, int32_t threads) {
  if (!are_inside(parts, rows, slots)) return false;
  const DeltaCall call{reinterpret_cast<const Part*>(parts.data()),
                       static_cast<int64_t>(parts.shape(0)),
                       pointer<void>(qkv[0]), pointer<void>(qkv[1]), pointer<void>(qkv[2]),
                       strides[0], strides[1], strides[2], pointer<float>(decay),
                       pointer<float>(beta), pointer<float>(states), pointer<void>(out),
                       sizes[0], sizes[1], sizes[2], sizes[3]};
  const KernelsOf& kernels = kernels_of(isa).of[dtype];
  nb::gil_scoped_release released;
  apply_delta_rule(kernels, call, threads);
  return true;
}

void gated_norm(const std::string& isa, int dtype, uintptr_t x, int64_t x_stride, uintptr_t z,
                int64_t z_stride, uintptr_t weight, bool wide_weight, uintptr_t out, int64_t rows,
                int32_t heads, int32_t size, float eps, int32_t threads) {
  const GatedNormCall call{pointer<void>(x), pointer<void>(z), pointer<void>(weight), x_stride,
                           z_stride, pointer<void>(out), heads, size, eps, wide_weight};
  const auto run = kernels_of(isa).of[dtype].gated_norm;
  nb::gil_scoped_release released;
  over_rows(rows, rows * heads * size * 16, threads,
            [&](int64_t begin, int64_t end) { run(call, begin, end); });
}

// Of `GroupNumbers`: addresses of values and supers, a Dtype, and a shift.
using Numbers = std::array<uintptr_t, 4>;

GroupNumbers numbers_of(const Numbers& of) {
  return {pointer<void>(of[0]), pointer<void>(of[1]), static_cast<int32_t>(of[2]),
          static_cast<int32_t>(of[3])};
}

void multiply_codes(const std::string& isa, std::array<int, 2> dtypes, uintptr_t x, uintptr_t y,
                    int64_t y_stride, int64_t rows, int32_t in, int32_t out, uintptr_t codes,
                    const Numbers& scales, const Numbers& minimums, uintptr_t zeros, int32_t zero,
                    uintptr_t table, uintptr_t bias, int32_t bits, int32_t group, int32_t pairs,
                    int32_t chunks, int32_t threads) {
  const int32_t depth = chunks * (kCodeBytes * 8 / bits);
  const PackedCodes weight{pointer<uint8_t>(codes),
                           numbers_of(scales),
                           numbers_of(minimums),
                           pointer<uint8_t>(zeros),
                           pointer<uint8_t>(table),
                           zero,
                           bits == 8 ? kEight : table == 0 ? kFour : kTable,
                           group,
                           pairs,
                           chunks,
                           depth,
                           group == 0 ? 1 : depth / group};
  const LinearCall call{weight, pointer<float>(bias), pointer<void>(x), pointer<void>(y), y_stride,
                        rows,   in,                   out,              nullptr};
  const Kernels* kernels = &kernels_of(isa);
  Program::perform([=] {
    multiply(*kernels, call, static_cast<Dtype>(dtypes[0]), static_cast<Dtype>(dtypes[1]), threads);
    return true;
  });
}

// Runs a call over rows in pieces; each row's logits are read some times.
template <class Call, class Run>
void over_logits(const std::string& isa, const Call& call, int64_t rows, int32_t threads, Run run) {
  const Kernels& kernels = kernels_of(isa);
  nb::gil_scoped_release released;
  over_rows(rows, rows * call.count * 16, threads,
            [&](int64_t begin, int64_t end) { run(call, kernels, begin, end); });
}

void draw_rows(const std::string& isa, uintptr_t logits, int64_t rows, int64_t count,
               uintptr_t settings, uint32_t steps, uintptr_t ids, uintptr_t status,
               int32_t threads) {
  const DrawCall call{pointer<float>(logits), count, pointer<SamplingRow>(settings), steps,
                      pointer<int64_t>(ids), pointer<int32_t>(status)};
  over_logits(isa, call, rows, threads, draw_tokens);
}

void log_sums_of(const std::string& isa, uintptr_t logits, int64_t count, uintptr_t index,
                 int64_t rows, uintptr_t sums, int32_t threads) {
  const LogSumCall call{pointer<float>(logits), count, pointer<int64_t>(index),
                        pointer<double>(sums)};
  over_logits(isa, call, rows, threads, log_sums);
}

void leading_of(const std::string& isa, uintptr_t logits, int64_t count, uintptr_t index,
                int64_t rows, int64_t most, uintptr_t values, uintptr_t ids, int32_t threads) {
  const LeadingCall call{pointer<float>(logits), count,           pointer<int64_t>(index), most,
                         pointer<float>(values), pointer<int64_t>(ids)};
  over_logits(isa, call, rows, threads, leading_tokens);
}

void ranks_of(const std::string& isa, uintptr_t logits, int64_t count, uintptr_t index,
              int64_t rows, uintptr_t ids, uintptr_t ranks, int32_t threads) {
  const RankCall call{pointer<float>(logits), count, pointer<int64_t>(index),
                      pointer<int64_t>(ids), pointer<int64_t>(ranks)};
  over_logits(isa, call, rows, threads, token_ranks);
}

}  // namespace

NB_MODULE(ONESTEM_MODULE, m) {
  m.def("compiled_isas", compiled_isas);
  m.def("has_isa", has_isa);
  m.def("default_rates", default_rates);
  m.def("find_openmp", find_openmp, nb::arg("folder").none());
  m.def("thread_source", thread_source);
  nb::class_<PreparedPlan>(m, "PreparedPlan")
      .def("last_page", &PreparedPlan::last_page)
      .def("describe", describe)
      .def("attend", attend_plan);
  nb::class_<Program>(m, "Program")
      .def(nb::init<int32_t>())
      .def("begin", &Program::begin)
      .def("end", &Program::end)
      .def("run", &Program::run);
  m.def("make_plan", make_plan, nb::rv_policy::take_ownership, nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("grid") = false,
        nb::arg("moved") = std::vector<int32_t>());
  m.def("add_rms_norm", add_rms_norm);
  m.def("rope_write", rope_write);
  m.def("silu_mul", silu_mul);
  m.def("causal_conv", causal_conv);
  m.def("delta_rule", delta_rule);
  m.def("gated_norm", gated_norm);
  m.def("multiply_codes", multiply_codes);
  m.def("draw_tokens", draw_rows);
  m.def("log_sums", log_sums_of);
  m.def("leading_tokens", leading_of);
  m.def("token_ranks", ranks_of);
#ifdef ONESTEM_EMULATED
  add_instructions(m);
#endif
}

}  // namespace onestem
