// Elementwise optimizer updates over lists of tensors, in one pass over memory.
//
// One pass does, for every element:  g = grad_scale * grad;  (p, s0, s1) = rule(p, g, s0, s1);  copy = cast(p);
// grad = 0 (optional). Arithmetic is fp32 whatever the stored types are; the definition in plain torch, which every level
// equals to 2 ulp and every level of ours to the bit, is ds_ops/reference/reference_update.py.
//
// Shapes: tensor t has numel[t] >= 0 contiguous elements in each of its streams, at any address that is a multiple of the
// element size; no two streams overlap. Types: param, grad, state and copy are each f32, bf16 or f16, one per list.
// Cost, in bytes an element with fp32 everything:
//   adam 28 (reads p g m v, writes p m v), lion, adagrad, sgd 20, sgd_plain 12, adam_undo 28,
//   lamb_moments 24 (writes m v only), lamb_apply 16 (reads p m v, writes p).
//   Each stream of a 16-bit type counts half; a copy adds 2 (4 for fp32), zero_grad the size of the gradient.
#pragma once
#include <ds/types.h>

namespace ds {

// The meaning of Update::c for each rule. "1-b1" and the like are rounded from double by the caller, once.
//
//   adam       p *= decay; g += l2 p; m += (1-b1)(g - m); v = b2 v + (1-b2) g^2; p -= step_size m / (sqrt(v)/bc2 + eps)
//              Adam: Kingma and Ba 2015, algorithm 1; AdamW (l2 = 0): Loshchilov and Hutter 2019, algorithm 2
//   lion       u = b1 m + (1-b1) g; p = p decay - lr sign(u); m = b2 m + (1-b2) g                Chen et al. 2023, program 1
//   adagrad    g += l2 p; s += g^2; p -= clr g / (sqrt(s) + eps)                                 Duchi et al. 2011
//   sgd        p *= decay; g += l2 p; m = momentum m + (1-dampening) g; p -= lr (nesterov ? g + momentum m : m)
//              as torch.optim.SGD defines it; sgd_plain is the same without m
//   lamb       r = m/(1-b1^t) / (sqrt(v)/sqrt(1-b2^t) + eps) + wd p; p -= lr |p|/|r| r in two passes   You et al. 2020
enum class Rule : std::int32_t {
  adam = 0,     // c = {decay, l2, 1-b1, b2, 1-b2, step_size, sqrt(1-b2^t), eps};  states: m, v
  lion = 1,     // c = {decay, b1, 1-b1, b2, 1-b2, lr};                            states: m
  adagrad = 2,  // c = {l2, clr, eps};                                             states: sum
  sgd = 3,      // c = {decay, l2, momentum, 1-dampening, nesterov, lr};           states: m
  sgd_plain = 4,     // c = {decay, l2, lr};                                       states: none
  adam_undo = 5,     // the inverse of `adam` with l2 = 0, same c plus {1/b1, 1/b2, 1/decay} at 8..10
  lamb_moments = 6,  // c as adam; updates m, v only and leaves sum p^2, sum u^2 per block in `partials`
  lamb_apply = 7,    // c as adam; p -= ratio[t] * lr * u, u recomputed from m, v and the old p
};
constexpr int max_coefficients = 12;

// c[11] of adam, adagrad and lamb_moments: the dither of this step, in [-1/2, 1/2). Where states are of a 16-bit type, the
// second moment (adagrad's sum) is stored as round(x + dither * spacing(x)), not below x's power of two: rounded to nearest, v + (1-b2)(g^2 - v) stays at v
// for ever once the change is below half its spacing (b2 = 0.999 in bf16: always). All elements have the same dither, so that
// results do not depend on how they are cut; it runs through the interval as steps go by, so that changes count on average.
// 0 rounds to nearest.
constexpr int dither_at = 11;

// The stream that is dithered: 0 or 1; -1: none.
constexpr int second_moment(Rule r) {
  return r == Rule::adam || r == Rule::lamb_moments ? 1 : r == Rule::adagrad ? 0 : -1;
}

constexpr int num_states(Rule r) {
  return r == Rule::adam || r == Rule::adam_undo || r == Rule::lamb_moments || r == Rule::lamb_apply ? 2
         : r == Rule::sgd_plain                                                                      ? 0
                                                                                                     : 1;
}

// A list of tensors seen as columns: numel[i], then one address per stream and tensor. Null columns are absent.
struct UpdateList {
  std::int64_t count;
  const std::int64_t *numel;                                 // [count]
  const std::int64_t *param, *grad, *state0, *state1, *copy;  // [count] addresses
  Dtype param_dtype, grad_dtype, state_dtype, copy_dtype;
};

struct Update {
  Rule rule;
  bool zero_grad;
  float grad_scale;
  float c[max_coefficients];
  const float *ratio;  // [count], lamb_apply only
  double *partials;    // [2 * blocks of all tensors], lamb_moments only; see update_blocks()
  UpdateList list;
  const float *scale = nullptr;  // one number beside the tensors that multiplies grad_scale; on a device only
};

// Elements that are staged, and summed, together. Fixed, so that sums do not depend on threads or instruction set; small,
// so that converting one block overlaps with the memory traffic of the next (512: 54 GB/s, 2048: 43, 128: 47).
constexpr std::int64_t update_block = 512;

// (p, s0, s1) = rule(p, grad_scale * grad, s0, s1) for every element of `u.list` [count], on `threads` threads.
// Types and cost in bytes: above. Source: beside each rule.
Status update(const Update &u, int threads);

}  // namespace ds
