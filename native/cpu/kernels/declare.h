// Declares this level's functions; every kernel file defines some of them, table.cpp collects them.
#pragma once
#include "table.h"

namespace ds::DS_ISA {
void update(const Update &u, std::int64_t t, std::int64_t begin, std::int64_t end);
Norms measure(const void *x, Dtype dtype, std::int64_t n);
Norms sum_sources(void *dst, const void *const *src, int count, Dtype dtype, std::int64_t from, std::int64_t n,
                   bool streaming);
void convert(void *dst, Dtype dd, const void *src, Dtype sd, std::int64_t n, float scale, bool streaming);
void fill(void *dst, Dtype dtype, std::int64_t n, float value);
void triad(float *a, const float *b, const float *c, std::int64_t n, float s, bool streaming);
void gather_rows(void *out, const void *x, std::int64_t bytes, const std::int64_t *index, std::int64_t per, std::int64_t begin,
                 std::int64_t end, bool streaming);
void sum_rows(void *out, const void *x, Dtype dtype, std::int64_t cols, const std::int64_t *index, const float *weights,
              std::int64_t each, std::int64_t begin, std::int64_t end);
void norm_rows(const Norm &n, std::int64_t begin, std::int64_t end, float *scratch);
void norm_grad_rows(const NormGrad &n, std::int64_t begin, std::int64_t end, std::int64_t block, float *scratch);
void quantize_group(const QuantSpec &s, unsigned char *codes, float *params, const void *x, Dtype dtype, std::int64_t n,
                    std::int64_t index);
void dequantize_groups(const QuantSpec &s, const QuantSources &q, std::int64_t first, float factor, void *out,
                       Dtype dtype, std::int64_t n);
void quant_dots(const QuantSpec &s, const QuantSources &q, std::int64_t cols, const float *x, std::int64_t tokens, float *y,
                std::int64_t stride);
void combine(void *dst, const void *const *src, int count, shm::Element element, shm::Op op, std::int64_t n,
             bool streaming);
void copy_streaming(void *dst, const void *src, std::int64_t nbytes);
std::int64_t panel_bytes(const decoder::Matrix &m, std::int64_t tall);
void panel_row(const decoder::Matrix &m, const float *x, void *panel, std::int64_t tall, std::int64_t row);
void dense(const decoder::Matrix &m, std::int64_t unit, const void *panel, std::int64_t tall, int rows, float *out,
           const decoder::Ahead &ahead);
void decoder_norm(const decoder::Normed &n, const float *x, std::int64_t size, float *out);
void decoder_activate(decoder::Activation kind, const float *gate, const float *value, float *out);
void decoder_place(const decoder::Step &s, const decoder::Layer &y, const decoder::Chunk &c, std::int64_t row,
                   std::int64_t from, std::int64_t to, float *qkv);
void decoder_place_latent(const decoder::Step &s, const decoder::Layer &y, const decoder::Chunk &c, std::int64_t row, float *kv,
                          float *queries);
std::int64_t attend_floats(const decoder::Layer &y);
void decoder_attend(const decoder::Step &s, const decoder::Layer &y, const decoder::Attend &a, float *scratch);
}  // namespace ds::DS_ISA
