// The functions that exist once per instruction-set level. One table per level; dispatch.cpp picks one.
#pragma once
#include <ds/decoder.h>
#include <ds/norm.h>
#include <ds/quant.h>
#include <ds/shm.h>
#include <ds/stream.h>
#include <ds/update.h>

namespace ds {

// One row of each of `count` quantized sources, `stride` bytes apart. streaming: results are written past the cache; the
// caller ends with end_of_streaming().
struct QuantSources {
  const unsigned char *row;
  std::int64_t count, stride, params_at;
  bool streaming;
};

struct Kernels {
  const char *name;
  // Elements [begin, end) of tensor `t`. For lamb_moments, `begin` is a multiple of update_block.
  void (*update)(const Update &u, std::int64_t t, std::int64_t begin, std::int64_t end);
  Norms (*measure)(const void *x, Dtype dtype, std::int64_t n);  // n <= norm_block
  // Elements [from, from + n) of all arrays; n <= norm_block, a multiple of 16 but for the last. Returns what the sum measures.
  Norms (*sum_sources)(void *dst, const void *const *src, int count, Dtype dtype, std::int64_t from, std::int64_t n,
                        bool streaming);
  void (*convert)(void *dst, Dtype dd, const void *src, Dtype sd, std::int64_t n, float scale, bool streaming);
  void (*fill)(void *dst, Dtype dtype, std::int64_t n, float value);
  void (*triad)(float *a, const float *b, const float *c, std::int64_t n, float s, bool streaming);
  void (*combine)(void *dst, const void *const *src, int count, shm::Element element, shm::Op op, std::int64_t n,
                  bool streaming);
  void (*copy_streaming)(void *dst, const void *src, std::int64_t nbytes);  // past the cache; they do not overlap
  // One group of `n` elements; `index` is the first one's place in the sequence of random draws.
  void (*quantize_group)(const QuantSpec &s, unsigned char *codes, float *params, const void *x, Dtype dtype,
                         std::int64_t n, std::int64_t index);
  // out = factor * the sum over sources of the `n` elements that start with group `first`.
  void (*dequantize_groups)(const QuantSpec &s, const QuantSources &q, std::int64_t first, float factor, void *out,
                            Dtype dtype, std::int64_t n);
  // y[t * stride] = the product of one quantized row of `cols` elements (of one source) with row t of x [tokens, cols].
  void (*quant_dots)(const QuantSpec &s, const QuantSources &q, std::int64_t cols, const float *x, std::int64_t tokens,
                     float *y, std::int64_t stride);
  // Rows [begin, end) of out. streaming: past the cache.
  void (*gather_rows)(void *out, const void *x, std::int64_t bytes, const std::int64_t *index, std::int64_t per, std::int64_t begin,
                      std::int64_t end, bool streaming);
  void (*sum_rows)(void *out, const void *x, Dtype dtype, std::int64_t cols, const std::int64_t *index, const float *weights,
                   std::int64_t each, std::int64_t begin, std::int64_t end);
  void (*norm_rows)(const Norm &n, std::int64_t begin, std::int64_t end, float *scratch);  // scratch [cols]
  // Rows of block `block`; scratch [2, cols].
  void (*norm_grad_rows)(const NormGrad &n, std::int64_t begin, std::int64_t end, std::int64_t block, float *scratch);
  std::int64_t (*panel_bytes)(const decoder::Matrix &m, std::int64_t tall);  // of a panel with place for `tall` rows: 1 to 4, or 12
  // Row `row` of a panel, of m.k inputs.
  void (*panel_row)(const decoder::Matrix &m, const float *x, void *panel, std::int64_t tall, std::int64_t row);
  // out [tall, 32]: of the first `rows` rows, the outputs of one unit, bias added. What is behind them is overwritten.
  void (*dense)(const decoder::Matrix &m, std::int64_t unit, const void *panel, std::int64_t tall, int rows, float *out,
           const decoder::Ahead &ahead);
  void (*decoder_norm)(const decoder::Normed &n, const float *x, std::int64_t size, float *out);
  // out [32] = f(gate), times value if there is one.
  void (*decoder_activate)(decoder::Activation kind, const float *gate, const float *value, float *out);
  // For one row of a layer with latents, in place: kv (latent, rotated part of the key) to the cache, and the queries' rotated parts.
  void (*decoder_place_latent)(const decoder::Step &s, const decoder::Layer &y, const decoder::Chunk &c, std::int64_t row, float *kv,
                               float *queries);
  // Norms and turns queries and keys of one row, in place, and writes keys and values to the cache: of heads [from, to) of keys,
  // and the queries that read them.
  void (*decoder_place)(const decoder::Step &s, const decoder::Layer &y, const decoder::Chunk &c, std::int64_t row,
                        std::int64_t from, std::int64_t to, float *qkv);
  std::int64_t (*attend_floats)(const decoder::Layer &y);  // of the scratch of the next
  void (*decoder_attend)(const decoder::Step &s, const decoder::Layer &y, const decoder::Attend &a, float *scratch);
};

// The table of the level in use.
const Kernels &kernels();

// Every table this machine can run, best first; for tests that compare levels. Returns how many were written.
int supported_kernels(const Kernels **out, int capacity);

}  // namespace ds
