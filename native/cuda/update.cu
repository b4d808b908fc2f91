// Optimizer steps over a list of tensors in one launch: a block takes one chunk of one tensor, found in the table.
#include "device.h"

namespace ds::cuda {

constexpr int update_threads = 256;
constexpr std::int64_t update_chunk = 8192;  // elements of one tensor that a block updates

// rows: int64 [7, count] on the device: numel, addresses of param, grad, state0, state1, copy (0 where absent), and the number of chunks
// of all tensors before. c: the rule's coefficients, native/include/ds/update.h. partials: fp64 [chunks, 2], lamb_moments only.
struct UpdateCall {
  const std::int64_t *rows;
  std::int64_t count;
  const float *scale, *ratio;  // null, or one factor of all gradients; lamb_apply: [count]
  double *partials;
  float c[12];
  float grad_scale;
  std::int32_t param, grad, state, copy;  // Dtype
  std::int32_t second;                    // the state that is dithered by c[11]; -1: none
  std::int32_t zero_grad;
};

struct Element {  // one number of each stream
  float p, g, s0, s1;
};

struct Adam {
  static constexpr int states = 2;
  float decay, l2, omb1, b2, omb2, step_size, bc2, eps;
  DS_MEMBER explicit Adam(const float *c)
      : decay(c[0]), l2(c[1]), omb1(c[2]), b2(c[3]), omb2(c[4]), step_size(c[5]), bc2(c[6]), eps(c[7]) {}
};
DS_FN void moments(const Adam &a, Element &x) {
  x.s0 = fmaf(a.omb1, x.g - x.s0, x.s0);
  x.s1 = fmaf(a.omb2 * x.g, x.g, a.b2 * x.s1);
}
DS_FN float denominator(const Adam &a, float v) { return sqrtf(v) / a.bc2 + a.eps; }
DS_FN void step(const Adam &a, Element &x, std::int64_t) {
  x.p = x.p * a.decay;
  x.g = fmaf(a.l2, x.p, x.g);
  moments(a, x);
  x.p = x.p - a.step_size * x.s0 / denominator(a, x.s1);
}

struct AdamUndo {
  static constexpr int states = 2;
  Adam a;
  float inv_b1, inv_b2, inv_decay;
  DS_MEMBER explicit AdamUndo(const float *c) : a(c), inv_b1(c[8]), inv_b2(c[9]), inv_decay(c[10]) {}
};
DS_FN float finite(float x) { return (to_bits(x) & 0x7f800000u) == 0x7f800000u ? 0.0f : x; }
DS_FN void step(const AdamUndo &u, Element &x, std::int64_t) {
  x.p = finite((x.p + u.a.step_size * x.s0 / denominator(u.a, x.s1)) * u.inv_decay);
  x.s0 = finite((x.s0 - u.a.omb1 * x.g) * u.inv_b1);
  const float v = finite((x.s1 - u.a.omb2 * x.g * x.g) * u.inv_b2);
  x.s1 = v < 0.0f ? 0.0f : v;
}

struct Lion {
  static constexpr int states = 1;
  float decay, b1, omb1, b2, omb2, lr;
  DS_MEMBER explicit Lion(const float *c) : decay(c[0]), b1(c[1]), omb1(c[2]), b2(c[3]), omb2(c[4]), lr(c[5]) {}
};
DS_FN void step(const Lion &r, Element &x, std::int64_t) {
  const float u = fmaf(r.omb1, x.g, r.b1 * x.s0);
  const float move = u > 0.0f ? r.lr : u < 0.0f ? -r.lr : u == 0.0f ? 0.0f : u;  // lr * sign(u); NaN stays
  x.p = x.p * r.decay - move;
  x.s0 = fmaf(r.omb2, x.g, r.b2 * x.s0);
}

struct Adagrad {
  static constexpr int states = 1;
  float l2, clr, eps;
  DS_MEMBER explicit Adagrad(const float *c) : l2(c[0]), clr(c[1]), eps(c[2]) {}
};
DS_FN void step(const Adagrad &r, Element &x, std::int64_t) {
  x.g = fmaf(r.l2, x.p, x.g);
  x.s0 = fmaf(x.g, x.g, x.s0);
  x.p = x.p - r.clr * x.g / (sqrtf(x.s0) + r.eps);
}

struct Sgd {
  static constexpr int states = 1;
  float decay, l2, momentum, omd, nesterov, lr;
  DS_MEMBER explicit Sgd(const float *c) : decay(c[0]), l2(c[1]), momentum(c[2]), omd(c[3]), nesterov(c[4]), lr(c[5]) {}
};
DS_FN void step(const Sgd &r, Element &x, std::int64_t) {
  x.p = x.p * r.decay;
  x.g = fmaf(r.l2, x.p, x.g);
  x.s0 = fmaf(r.omd, x.g, x.s0 * r.momentum);
  x.p = fmaf(-r.lr, r.nesterov != 0.0f ? fmaf(r.momentum, x.s0, x.g) : x.s0, x.p);
}

struct SgdPlain {
  static constexpr int states = 0;
  float decay, l2, lr;
  DS_MEMBER explicit SgdPlain(const float *c) : decay(c[0]), l2(c[1]), lr(c[2]) {}
};
DS_FN void step(const SgdPlain &r, Element &x, std::int64_t) {
  x.p = x.p * r.decay;
  x.p = fmaf(-r.lr, fmaf(r.l2, x.p, x.g), x.p);
}

struct Lamb : Adam {  // as in native/cpu/kernels/update.cpp
  float inside, inv_c2;
  DS_MEMBER explicit Lamb(const float *c) : Adam(c), inside(c[9]), inv_c2(c[10]) {}
};
DS_FN float lamb_direction(const Lamb &a, const Element &x) {
  const float root = a.inside != 0.0f ? sqrtf(fmaf(a.inv_c2, x.s1, a.inside)) : denominator(a, x.s1);
  return fmaf(a.decay, x.p, a.step_size * x.s0 / root);
}
struct LambApply {
  static constexpr int states = 2;
  Lamb a;
  float lr;
  const float *ratio;
  DS_MEMBER LambApply(const float *c, const float *r) : a(c), lr(c[8]), ratio(r) {}
};
DS_FN void step(const LambApply &r, Element &x, std::int64_t t) {
  x.p = fmaf(-(r.lr * r.ratio[t]), lamb_direction(r.a, x), x.p);
}

// As in native/cpu/kernels/update.cpp.
DS_FN float dithered(float x, Dtype d, float dither) {
  const std::uint32_t exponent = to_bits(x) & 0x7f800000u;
  if (exponent == 0x7f800000u) return x;
  float spacing = from_bits(exponent) * (d == Dtype::bf16 ? 0x1p-7f : 0x1p-10f);
  if (d == Dtype::f16 && spacing < 0x1p-24f) spacing = 0x1p-24f;
  const float y = x + spacing * dither;
  return y < from_bits(exponent) ? from_bits(exponent) : y;
}

DS_FN float factor_of(const UpdateCall &a) { return a.scale ? a.grad_scale * a.scale[0] : a.grad_scale; }

// The last tensor whose first chunk is not after `chunk`; tensors without elements have no chunk.
DS_FN std::int64_t tensor_of(const UpdateCall &a, std::int64_t chunk) {
  const std::int64_t *first = a.rows + 6 * a.count;
  std::int64_t lo = 0, hi = a.count;
  while (hi - lo > 1) {
    const std::int64_t middle = (lo + hi) / 2;
    if (first[middle] <= chunk)
      lo = middle;
    else
      hi = middle;
  }
  return lo;
}

struct Chunk {
  std::int64_t tensor, begin, end;
  void *p, *g, *s0, *s1, *copy;
};
DS_FN void *column(const UpdateCall &a, int row, std::int64_t t) { return reinterpret_cast<void *>(a.rows[row * a.count + t]); }
DS_FN Chunk chunk_of(const UpdateCall &a, std::int64_t chunk) {
  const std::int64_t t = tensor_of(a, chunk), n = a.rows[t];
  const std::int64_t begin = (chunk - a.rows[6 * a.count + t]) * update_chunk;
  return {t, begin, n - begin < update_chunk ? n : begin + update_chunk, column(a, 1, t), column(a, 2, t),
          column(a, 3, t), column(a, 4, t), column(a, 5, t)};
}

template <class R>
struct Made {  // a rule from the call's coefficients
  DS_MEMBER static R from(const UpdateCall &a) { return R(a.c); }
};
template <>
struct Made<LambApply> {
  DS_MEMBER static LambApply from(const UpdateCall &a) { return LambApply(a.c, a.ratio); }
};

template <class R>
DS_FN void update(const UpdateCall &a) {
  const R rule = Made<R>::from(a);
  const Chunk c = chunk_of(a, block_index());
  const float factor = factor_of(a), dither = a.c[11];
  const Dtype param = static_cast<Dtype>(a.param), grad = static_cast<Dtype>(a.grad), state = static_cast<Dtype>(a.state);
  for (std::int64_t i = c.begin + 4 * thread_index(); i < c.end; i += 4 * update_threads) {
    const int m = quad_size(i, c.end);
    Quad p = load_quad(c.p, param, i, m), g = load_quad(c.g, grad, i, m), s0 = {}, s1 = {};
    if (R::states > 0) s0 = load_quad(c.s0, state, i, m);
    if (R::states > 1) s1 = load_quad(c.s1, state, i, m);
    DS_UNROLL
    for (int k = 0; k < 4; k++) {
      Element x = {p.v[k], g.v[k] * factor, s0.v[k], s1.v[k]};
      step(rule, x, c.tensor);
      p.v[k] = x.p, s0.v[k] = x.s0, s1.v[k] = x.s1;
      if (R::states > 0 && a.second == 0) s0.v[k] = dithered(x.s0, state, dither);
      if (R::states > 1 && a.second == 1) s1.v[k] = dithered(x.s1, state, dither);
    }
    store_quad(c.p, param, i, m, p);
    if (R::states > 0) store_quad(c.s0, state, i, m, s0);
    if (R::states > 1) store_quad(c.s1, state, i, m, s1);
    if (c.copy) store_quad(c.copy, static_cast<Dtype>(a.copy), i, m, p);
    if (a.zero_grad) store_quad(c.g, grad, i, m, Quad{{0.0f, 0.0f, 0.0f, 0.0f}});
  }
}

DS_FN void lamb_moments(const UpdateCall &a) {
  DS_SHARED double shared[update_threads / warp_threads];
  const Lamb rule(a.c);
  const Chunk c = chunk_of(a, block_index());
  const float factor = factor_of(a);
  const Dtype param = static_cast<Dtype>(a.param), grad = static_cast<Dtype>(a.grad), state = static_cast<Dtype>(a.state);
  double sum_p = 0.0, sum_u = 0.0;
  for (std::int64_t i = c.begin + 4 * thread_index(); i < c.end; i += 4 * update_threads) {
    const int m = quad_size(i, c.end);
    const Quad p = load_quad(c.p, param, i, m), g = load_quad(c.g, grad, i, m);
    Quad s0 = load_quad(c.s0, state, i, m), s1 = load_quad(c.s1, state, i, m);
    DS_UNROLL
    for (int k = 0; k < 4; k++) {
      if (k >= m) continue;
      Element x = {p.v[k], g.v[k] * factor, s0.v[k], s1.v[k]};
      moments(rule, x);
      const double u = lamb_direction(rule, x), w = x.p;
      sum_p += w * w, sum_u += u * u;
      s0.v[k] = x.s0, s1.v[k] = a.second == 1 ? dithered(x.s1, state, a.c[11]) : x.s1;
    }
    store_quad(c.s0, state, i, m, s0);
    store_quad(c.s1, state, i, m, s1);
    if (a.zero_grad) store_quad(c.g, grad, i, m, Quad{{0.0f, 0.0f, 0.0f, 0.0f}});
  }
  sum_p = team_sum<update_threads>(sum_p, shared);
  sum_u = team_sum<update_threads>(sum_u, shared);
  if (thread_index() == 0) a.partials[2 * block_index()] = sum_p, a.partials[2 * block_index() + 1] = sum_u;
}

}  // namespace ds::cuda
