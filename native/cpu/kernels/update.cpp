// Elementwise optimizer rules: the formulas, and the loop that stages blocks of any stored type around them.
#include "staging.h"
#include "declare.h"

namespace {

using ds::Rule;
using ds::Update;

struct Lanes {  // one vector of each stream
  vf p, g, s0, s1;
};

struct Adam {
  static constexpr int states = 2;
  float decay, l2, omb1, b2, omb2, step_size, bc2, inv_bc2, eps;
  explicit Adam(const float *c)
      : decay(c[0]), l2(c[1]), omb1(c[2]), b2(c[3]), omb2(c[4]), step_size(c[5]), bc2(c[6]), inv_bc2(1.0f / c[6]),
        eps(c[7]) {}
  DS_INLINE void moments(const Adam &a, Lanes &x) {
    x.s0 = fma(a.omb1, x.g - x.s0, x.s0);
    x.s1 = fma(a.omb2 * x.g, x.g, a.b2 * x.s1);
  }
  DS_INLINE vf denominator(const Adam &a, vf v) {
    return divide_by(sqrt(v), a.bc2, a.inv_bc2) + a.eps;
  }
  void operator()(Lanes &x) const {
    x.p = x.p * decay;
    x.g = fma(l2, x.p, x.g);
    moments(*this, x);
    x.p = x.p - step_size * x.s0 / denominator(*this, x.s1);
  }
};

// One AdamW step taken back: p first, from the moments it was made with, then the moments. Results that are not
// finite (an overflowed step) become 0.
struct AdamUndo {
  static constexpr int states = 2;
  Adam a;
  float inv_b1, inv_b2, inv_decay;
  explicit AdamUndo(const float *c) : a(c), inv_b1(c[8]), inv_b2(c[9]), inv_decay(c[10]) {}
  DS_INLINE vf finite(vf x) { return select((vi)((bits(x) & 0x7f800000u) != 0x7f800000u), x, vf{}); }
  void operator()(Lanes &x) const {
    x.p = finite((x.p + a.step_size * x.s0 / Adam::denominator(a, x.s1)) * inv_decay);
    x.s0 = finite((x.s0 - a.omb1 * x.g) * inv_b1);
    vf v = finite((x.s1 - a.omb2 * x.g * x.g) * inv_b2);
    x.s1 = select((vi)(v < 0.0f), vf{}, v);
  }
};

struct Lion {
  static constexpr int states = 1;
  float decay, b1, omb1, b2, omb2, lr;
  explicit Lion(const float *c) : decay(c[0]), b1(c[1]), omb1(c[2]), b2(c[3]), omb2(c[4]), lr(c[5]) {}
  void operator()(Lanes &x) const {
    const vf u = fma(omb1, x.g, b1 * x.s0);
    vf step = select((vi)(u == 0.0f), vf{}, from_bits((bits(u) & 0x80000000u) | bits(splat(lr))));  // lr * sign(u)
    step = select((vi)(u != u), u, step);
    x.p = x.p * decay - step;
    x.s0 = fma(omb2, x.g, b2 * x.s0);
  }
};

struct Adagrad {
  static constexpr int states = 1;
  float l2, clr, eps;
  explicit Adagrad(const float *c) : l2(c[0]), clr(c[1]), eps(c[2]) {}
  void operator()(Lanes &x) const {
    x.g = fma(l2, x.p, x.g);
    x.s0 = fma(x.g, x.g, x.s0);
    x.p = x.p - clr * x.g / (sqrt(x.s0) + eps);
  }
};

struct Sgd {
  static constexpr int states = 1;
  float decay, l2, momentum, omd, nesterov, lr;
  explicit Sgd(const float *c) : decay(c[0]), l2(c[1]), momentum(c[2]), omd(c[3]), nesterov(c[4]), lr(c[5]) {}
  void operator()(Lanes &x) const {
    x.p = x.p * decay;
    x.g = fma(l2, x.p, x.g);
    x.s0 = fma(omd, x.g, x.s0 * momentum);
    const vf d = nesterov != 0.0f ? fma(momentum, x.s0, x.g) : x.s0;
    x.p = fma(-lr, d, x.p);
  }
};

struct SgdPlain {
  static constexpr int states = 0;
  float decay, l2, lr;
  explicit SgdPlain(const float *c) : decay(c[0]), l2(c[1]), lr(c[2]) {}
  void operator()(Lanes &x) const {
    x.p = x.p * decay;
    x.p = fma(-lr, fma(l2, x.p, x.g), x.p);
  }
};

// LAMB's direction u = m/(1-b1^t) / (sqrt(v)/sqrt(1-b2^t) + eps) + wd * p, or with sqrt(v/(1-b2^t) + inside) where c[9],
// the inside, is not 0. Here c[0] is wd, c[5] is 1/(1-b1^t), c[10] is 1/(1-b2^t).
struct Lamb : Adam {
  float inside, inv_c2;
  explicit Lamb(const float *c) : Adam(c), inside(c[9]), inv_c2(c[10]) {}
};
DS_INLINE vf lamb_direction(const Lamb &a, const Lanes &x) {
  const vf root = a.inside != 0.0f ? sqrt(fma(a.inv_c2, x.s1, splat(a.inside))) : Adam::denominator(a, x.s1);
  return fma(a.decay, x.p, a.step_size * x.s0 / root);
}

struct LambApply {
  static constexpr int states = 2;
  Lamb a;
  float lr;
  LambApply(const float *c, float ratio) : a(c), lr(c[8] * ratio) {}
  void operator()(Lanes &x) const { x.p = fma(-lr, lamb_direction(a, x), x.p); }
};

// Whether a rule only looks at the states, and at no gradient.
template <class R>
constexpr bool only_parameters = false;
template <>
constexpr bool only_parameters<LambApply> = true;

struct Block {  // fp32 views of one block of each stream
  float *p, *g, *s0, *s1;
};

// Vectors of each stream that are loaded before any is stored, as registers allow. A load whose address agrees in its low
// 12 bits with a store still under way waits for it; streams of a list of tensors may start anywhere, and one vector at a
// time lost up to a fifth where their starts were a few lines apart.
constexpr int together = lanes == 16 ? 4 : lanes == 8 ? 2 : 1;

template <int K, class R>
DS_INLINE void step_vectors(const R &rule, const Block &b, std::int64_t i, float scale) {
  Lanes x[K];
  for (int k = 0; k < K; k++) x[k].p = load<vf>(b.p + i + k * lanes);
  if (!only_parameters<R>)
    for (int k = 0; k < K; k++) x[k].g = load<vf>(b.g + i + k * lanes) * scale;
  if (R::states > 0)
    for (int k = 0; k < K; k++) x[k].s0 = load<vf>(b.s0 + i + k * lanes);
  if (R::states > 1)
    for (int k = 0; k < K; k++) x[k].s1 = load<vf>(b.s1 + i + k * lanes);
  for (int k = 0; k < K; k++) rule(x[k]);
  for (int k = 0; k < K; k++) store(b.p + i + k * lanes, x[k].p);
  if (only_parameters<R>) return;
  if (R::states > 0)
    for (int k = 0; k < K; k++) store(b.s0 + i + k * lanes, x[k].s0);
  if (R::states > 1)
    for (int k = 0; k < K; k++) store(b.s1 + i + k * lanes, x[k].s1);
}

template <class R>
static void run(const R &rule, const Block &b, std::int64_t n, float scale) {
  std::int64_t i = 0;
  for (; i + together * lanes <= n; i += together * lanes) step_vectors<together>(rule, b, i, scale);
  for (; i + lanes <= n; i += lanes) step_vectors<1>(rule, b, i, scale);
  if (i == n) return;
  const std::int64_t r = n - i;
  Lanes x;
  x.p = load_part<vf>(b.p + i, r);
  x.g = load_part<vf>(b.g + i, r) * scale;
  if (R::states > 0) x.s0 = load_part<vf>(b.s0 + i, r);
  if (R::states > 1) x.s1 = load_part<vf>(b.s1 + i, r);
  rule(x);
  store_part(b.p + i, x.p, r);
  if (R::states > 0) store_part(b.s0 + i, x.s0, r);
  if (R::states > 1) store_part(b.s1 + i, x.s1, r);
}

// The sums of p^2 and u^2 of one block.
static void lamb_moments(const Lamb &a, const Block &b, std::int64_t n, float scale, double *sums) {
  Squares sum_p, sum_u;
  for (std::int64_t i = 0; i < n; i += Squares::width)
    for (int k = 0; k < Squares::width / lanes && i + k * lanes < n; k++) {
      const std::int64_t j = i + k * lanes, r = n - j < lanes ? n - j : lanes;
      Lanes x;
      if (r == lanes)
        x = {load<vf>(b.p + j), load<vf>(b.g + j) * scale, load<vf>(b.s0 + j), load<vf>(b.s1 + j)};
      else
        x = {load_part<vf>(b.p + j, r), load_part<vf>(b.g + j, r) * scale, load_part<vf>(b.s0 + j, r),
             load_part<vf>(b.s1 + j, r)};
      Adam::moments(a, x);
      float u[lanes], p[lanes] = {};
      store(u, lamb_direction(a, x));
      store(p, x.p);
      for (std::int64_t l = r; l < lanes; l++) u[l] = 0.0f;  // eps = 0 leaves NaN in absent lanes
      for (int h = 0; h < 2; h++) {
        Squares::add(sum_p, 2 * k + h, load<vf_half>(p + h * Squares::half));
        Squares::add(sum_u, 2 * k + h, load<vf_half>(u + h * Squares::half));
      }
      store_part(b.s0 + j, x.s0, r);
      store_part(b.s1 + j, x.s1, r);
    }
  sums[0] = Squares::total(sum_p);
  sums[1] = Squares::total(sum_u);
}

static void apply(const Update &u, std::int64_t t, const Block &b, std::int64_t n, double *sums) {
  switch (u.rule) {
    case Rule::adam: return run(Adam(u.c), b, n, u.grad_scale);
    case Rule::lion: return run(Lion(u.c), b, n, u.grad_scale);
    case Rule::adagrad: return run(Adagrad(u.c), b, n, u.grad_scale);
    case Rule::sgd: return run(Sgd(u.c), b, n, u.grad_scale);
    case Rule::sgd_plain: return run(SgdPlain(u.c), b, n, u.grad_scale);
    case Rule::adam_undo: return run(AdamUndo(u.c), b, n, u.grad_scale);
    case Rule::lamb_moments: return lamb_moments(Lamb(u.c), b, n, u.grad_scale, sums);
    case Rule::lamb_apply: return run(LambApply(u.c, u.ratio[t]), b, n, u.grad_scale);
  }
}

// x + dither * spacing(x) for numbers that are not negative, and no less than the power of two below x, where the spacing changes and a
// number just above it would go down too often. Infinities and NaN stay. The product is exact, so that fused and plain additions
// round alike.
DS_INLINE vf dithered(vf x, Dtype d, float dither) {
  const vu exponent = bits(x) & 0x7f800000u;
  vf spacing = from_bits(exponent) * (d == Dtype::bf16 ? 0x1p-7f : 0x1p-10f);
  if (d == Dtype::f16) spacing = select((vi)(spacing < 0x1p-24f), splat(0x1p-24f), spacing);  // of subnormal halves
  vf y = x + spacing * dither;
  y = select((vi)(y < from_bits(exponent)), from_bits(exponent), y);
  return select((vi)(exponent == 0x7f800000u), x, y);
}

static void dither_block(float *v, std::int64_t n, Dtype d, float dither) {
  each_vector(
      n, [&](std::int64_t i) { store(v + i, dithered(load<vf>(v + i), d, dither)); },
      [&](std::int64_t i, std::int64_t r) { store_part(v + i, dithered(load_part<vf>(v + i, r), d, dither), r); });
}

static void *column(const std::int64_t *addresses, std::int64_t t) {
  return addresses ? reinterpret_cast<void *>(addresses[t]) : nullptr;
}

static void update_range(const Update &u, std::int64_t t, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t size = ds::update_block;
  alignas(64) float scratch[4][size];
  const ds::UpdateList &l = u.list;
  void *p = column(l.param, t), *g = column(l.grad, t), *s0 = column(l.state0, t), *s1 = column(l.state1, t);
  void *copy = column(l.copy, t);
  const int states = ds::num_states(u.rule);
  const int second = ds::second_moment(u.rule);
  const bool dithers = second >= 0 && l.state_dtype != Dtype::f32 && u.c[ds::dither_at] != 0.0f;
  const bool writes_p = u.rule != Rule::lamb_moments, writes_states = u.rule != Rule::lamb_apply;
  for (std::int64_t i = begin; i < end; i += size) {
    const std::int64_t n = end - i < size ? end - i : size;
    Block b = {stage_in(p, l.param_dtype, i, n, scratch[0]), stage_in(g, l.grad_dtype, i, n, scratch[1]), nullptr,
               nullptr};
    if (states > 0) b.s0 = stage_in(s0, l.state_dtype, i, n, scratch[2]);
    if (states > 1) b.s1 = stage_in(s1, l.state_dtype, i, n, scratch[3]);
    double *sums = u.partials ? u.partials + 2 * (i / size) : nullptr;
    apply(u, t, b, n, sums);
    if (dithers) dither_block(second == 0 ? b.s0 : b.s1, n, l.state_dtype, u.c[ds::dither_at]);
    if (writes_p) stage_out(p, l.param_dtype, i, n, b.p);
    if (states > 0 && writes_states) stage_out(s0, l.state_dtype, i, n, b.s0);
    if (states > 1 && writes_states) stage_out(s1, l.state_dtype, i, n, b.s1);
    if (copy && l.copy_dtype == Dtype::f32) std::memcpy(at(copy, Dtype::f32, i), b.p, static_cast<std::size_t>(n) * 4);
    if (copy && l.copy_dtype != Dtype::f32) narrow_streaming(at(copy, l.copy_dtype, i), l.copy_dtype, b.p, n);
    if (u.zero_grad) std::memset(at(g, l.grad_dtype, i), 0, static_cast<std::size_t>(n * ds::size_of(l.grad_dtype)));
  }
  if (copy) stream_fence();
}

}  // namespace

namespace ds::DS_ISA {
void update(const Update &u, std::int64_t t, std::int64_t begin, std::int64_t end) { update_range(u, t, begin, end); }
}  // namespace ds::DS_ISA
