// Reduction of several sources, compiled once per instruction-set level. Blocks stay in the first-level cache.
#include "kernels/declare.h"
#include "kernels/staging.h"

namespace {

using ds::shm::Element;
using ds::shm::Op;

constexpr std::int64_t block = 1024;

template <class T>
DS_INLINE T apply(Op op, T a, T b) {
  switch (op) {
    case Op::product: return static_cast<T>(a * b);
    // NaN wins on either side, as torch's minimum and maximum have it: a comparison with NaN is false.
    case Op::min: return b < a || b != b ? b : a;
    case Op::max: return b > a || b != b ? b : a;
    default: return static_cast<T>(a + b);
  }
}

template <class T>
DS_INLINE T apply_bits(Op op, T a, T b) {
  switch (op) {
    case Op::band: return static_cast<T>(a & b);
    case Op::bor: return static_cast<T>(a | b);
    case Op::bxor: return static_cast<T>(a ^ b);
    default: return apply(op, a, b);
  }
}

// The operation is a constant inside each loop, so that the loops are vectorised.
template <Op op, class T>
static void fold(T *acc, const T *x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i++) acc[i] = apply(op, acc[i], x[i]);
}
template <Op op, class T>
static void fold_bits(T *acc, const T *x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i++) acc[i] = apply_bits(op, acc[i], x[i]);
}

template <class T>
static void fold_any(Op op, T *acc, const T *x, std::int64_t n) {
  switch (op) {
    case Op::product: return fold<Op::product>(acc, x, n);
    case Op::min: return fold<Op::min>(acc, x, n);
    case Op::max: return fold<Op::max>(acc, x, n);
    default: return fold<Op::sum>(acc, x, n);
  }
}
template <class T>
static void fold_any_bits(Op op, T *acc, const T *x, std::int64_t n) {
  switch (op) {
    case Op::band: return fold_bits<Op::band>(acc, x, n);
    case Op::bor: return fold_bits<Op::bor>(acc, x, n);
    case Op::bxor: return fold_bits<Op::bxor>(acc, x, n);
    default: return fold_any(op, acc, x, n);
  }
}

template <class T>
DS_INLINE const T *source(const void *const *src, int k, std::int64_t i) {
  return static_cast<const T *>(src[k]) + i;
}

// Whole aligned vectors go past the cache: what is written is not read again soon, and no line is fetched to be overwritten.
// `ahead`: bytes from where a source that is not in the first-level cache is asked for early; 0: it is there.
template <std::int64_t ahead>
static void copy_past_cache(unsigned char *dst, const unsigned char *src, std::int64_t nbytes) {
  constexpr std::int64_t width = lanes * 4;
  std::int64_t i = (-reinterpret_cast<std::intptr_t>(dst)) & (width - 1);
  if (i > nbytes) i = nbytes;
  std::memcpy(dst, src, static_cast<std::size_t>(i));
  for (; i + width <= nbytes; i += width) {
    if (ahead) __builtin_prefetch(src + i + ahead, 0, 0);
    stream(reinterpret_cast<float *>(dst + i), load<vf>(reinterpret_cast<const float *>(src + i)));
  }
  std::memcpy(dst + i, src + i, static_cast<std::size_t>(nbytes - i));
}

template <class T>
DS_INLINE void put_block(T *dst, const T *acc, std::int64_t m, bool streaming) {
  const std::int64_t nbytes = m * static_cast<std::int64_t>(sizeof(T));
  if (streaming) return copy_past_cache<0>(reinterpret_cast<unsigned char *>(dst), reinterpret_cast<const unsigned char *>(acc), nbytes);
  std::memcpy(dst, acc, static_cast<std::size_t>(nbytes));
}

// Sums and averages of fp32 stay in registers: with a stage in the cache between sources, memory waits for the adder.
// Elements [from, to), in order of the sources; streaming wants dst + from aligned to the vector.
template <bool streaming>
static void sum_registers(float *dst, const void *const *src, int count, Op op, std::int64_t from, std::int64_t to) {
  constexpr int wide = 4;
  const auto x = [&](int k, std::int64_t i) { return load<vf>(source<float>(src, k, i)); };
  const float parts = op == Op::average ? static_cast<float>(count) : 1.0f;
  std::int64_t i = from;
  for (; i + wide * lanes <= to; i += wide * lanes) {
    vf acc[wide];
    for (int w = 0; w < wide; w++) acc[w] = x(0, i + w * lanes) + x(1, i + w * lanes);
    for (int k = 2; k < count; k++)
      for (int w = 0; w < wide; w++) acc[w] += x(k, i + w * lanes);
    if (op == Op::average)
      for (int w = 0; w < wide; w++) acc[w] = acc[w] / parts;
    for (int w = 0; w < wide; w++) {
      if (streaming) stream(dst + i + w * lanes, acc[w]);
      else store(dst + i + w * lanes, acc[w]);
    }
  }
  for (; i < to; i++) {
    float acc = *source<float>(src, 0, i);
    for (int k = 1; k < count; k++) acc += *source<float>(src, k, i);
    dst[i] = acc / parts;
  }
}

static void sum_floats(float *dst, const void *const *src, int count, Op op, std::int64_t n, bool streaming) {
  constexpr std::int64_t width = lanes * 4;
  const std::int64_t misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(dst)) & (width - 1);
  if (!streaming || misaligned % 4) return sum_registers<false>(dst, src, count, op, 0, n);
  std::int64_t head = misaligned ? (width - misaligned) / 4 : 0;
  if (head > n) head = n;
  sum_registers<false>(dst, src, count, op, 0, head);
  sum_registers<true>(dst, src, count, op, head, n);
}

template <class T>
static void combine_floats(T *dst, const void *const *src, int count, Op op, std::int64_t n, bool streaming) {
  alignas(64) T acc[block];
  for (std::int64_t i = 0; i < n; i += block) {
    const std::int64_t m = n - i < block ? n - i : block;
    std::memcpy(acc, source<T>(src, 0, i), static_cast<std::size_t>(m) * sizeof(T));
    for (int k = 1; k < count; k++) fold_any(op, acc, source<T>(src, k, i), m);
    if (op == Op::average)
      for (std::int64_t j = 0; j < m; j++) acc[j] /= static_cast<T>(count);
    put_block(dst + i, acc, m, streaming);
  }
}

template <class T>
static void combine_integers(T *dst, const void *const *src, int count, Op op, std::int64_t n, bool streaming) {
  alignas(64) T acc[block];
  for (std::int64_t i = 0; i < n; i += block) {
    const std::int64_t m = n - i < block ? n - i : block;
    std::memcpy(acc, source<T>(src, 0, i), static_cast<std::size_t>(m) * sizeof(T));
    for (int k = 1; k < count; k++) fold_any_bits(op, acc, source<T>(src, k, i), m);
    put_block(dst + i, acc, m, streaming);
  }
}

static void combine_halves(void *dst, const void *const *src, int count, Dtype d, Op op, std::int64_t n,
                           bool streaming) {
  alignas(64) float acc[block], next[block];
  for (std::int64_t i = 0; i < n; i += block) {
    const std::int64_t m = n - i < block ? n - i : block;
    widen(acc, at(src[0], d, i), d, m);
    for (int k = 1; k < count; k++) {
      widen(next, at(src[k], d, i), d, m);
      fold_any(op, acc, static_cast<const float *>(next), m);
    }
    if (op == Op::average)
      for (std::int64_t j = 0; j < m; j++) acc[j] /= static_cast<float>(count);
    if (streaming) narrow_streaming(at(dst, d, i), d, acc, m);
    else narrow(at(dst, d, i), d, acc, m);
  }
}

// torch's booleans: any non-zero byte is true, sums saturate, results are 0 or 1.
static void combine_booleans(unsigned char *dst, const void *const *src, int count, Op op, std::int64_t n) {
  const bool all = op == Op::product || op == Op::min || op == Op::band;
  for (std::int64_t i = 0; i < n; i++) {
    unsigned char acc = *source<unsigned char>(src, 0, i) != 0;
    for (int k = 1; k < count; k++) {
      const unsigned char x = *source<unsigned char>(src, k, i) != 0;
      acc = op == Op::bxor ? acc ^ x : all ? acc & x : acc | x;
    }
    dst[i] = acc;
  }
}

}  // namespace

namespace ds::DS_ISA {

void combine(void *dst, const void *const *src, int count, Element element, Op op, std::int64_t n,
             bool streaming) {
  switch (element) {
    case Element::f32:
      if (count > 1 && (op == Op::sum || op == Op::average)) sum_floats(static_cast<float *>(dst), src, count, op, n, streaming);
      else combine_floats(static_cast<float *>(dst), src, count, op, n, streaming);
      break;
    case Element::f64: combine_floats(static_cast<double *>(dst), src, count, op, n, streaming); break;
    case Element::bf16: combine_halves(dst, src, count, Dtype::bf16, op, n, streaming); break;
    case Element::f16: combine_halves(dst, src, count, Dtype::f16, op, n, streaming); break;
    case Element::i64: combine_integers(static_cast<std::int64_t *>(dst), src, count, op, n, streaming); break;
    case Element::i32: combine_integers(static_cast<std::int32_t *>(dst), src, count, op, n, streaming); break;
    case Element::i16: combine_integers(static_cast<std::int16_t *>(dst), src, count, op, n, streaming); break;
    case Element::i8: combine_integers(static_cast<std::int8_t *>(dst), src, count, op, n, streaming); break;
    case Element::u8: combine_integers(static_cast<std::uint8_t *>(dst), src, count, op, n, streaming); break;
    case Element::boolean: combine_booleans(static_cast<unsigned char *>(dst), src, count, op, n); break;
  }
  if (streaming) stream_fence();
}

void copy_streaming(void *dst, const void *src, std::int64_t nbytes) {
  copy_past_cache<2048>(static_cast<unsigned char *>(dst), static_cast<const unsigned char *>(src), nbytes);
  stream_fence();
}

}  // namespace ds::DS_ISA
