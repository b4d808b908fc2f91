// One step of a decoder over a ragged batch and a paged cache, on the CPU: all layers and the head in one call.
//
// Words. A *row* is one token of the batch. A *chunk* is consecutive rows of one sequence. A *unit* is 32 outputs of a
// matrix, packed together: for each input the 32 weights stand side by side, so that one vector of weights is read once,
// becomes numbers once, and is multiplied with the input of every row. The definition in plain torch is the forward of
// ds_inference/decoder_model.py; the packing is ds_ops/native_decoder.py.
//
// All structures hold 8-byte words only: Python writes them as tables.
#pragma once
#include <ds/types.h>

namespace ds::decoder {

using Word = std::int64_t;
constexpr Word unit = 32;
constexpr Word panel_rows = 12;  // of one call of a product

// Packed weights [n / 32][...][32], n and k padded with zeros:
//   f32   [k][32] floats          bf16  [k / 2][32][2]
//   int8  [k / 4][32][4] bytes    int4  [k / 8][32][4] bytes; the low nibble of byte i is input i, the high one input 4 + i
// Codes are unsigned; a weight is (code - zero) * scale, scale and zero fp32 [n / 32][k / group][2][32].
enum class Kind : Word { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

// What weights are multiplied with: fp32 inputs; inputs rounded to int8 by group and row, for codes (VNNI multiplies them); or
// inputs rounded to bf16, for weights of bf16 (there is an instruction for pairs of them). Where the processor has no such
// instruction, rounded inputs are multiplied as fp32: the same numbers.
enum class Inputs : Word { f32 = 0, int8 = 1, bf16 = 2 };

struct Matrix {
  const void *data;
  const float *params, *bias;  // bias [n], null: none
  Word n, k;                   // padded: n to 32 (64 if two halves are gated), k to 8
  Word group;                  // inputs that share a scale; k is not always a multiple
  Kind kind;
  Inputs inputs;
};

// y = x / norm * (offset + weight) + bias. kind 0: root mean square, 1: mean and variance. No weight: no norm.
struct Normed {
  const float *weight, *bias;
  double eps, offset;
  Word kind;
};

enum class Activation : Word { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, quick_gelu = 4, relu_squared = 5 };

// Element types of the cache: fp32, bf16, or int8 with one scale for a token and head.
enum class Kept : Word { f32 = 0, bf16 = 1, int8 = 2 };

// A router and experts, beside or instead of the layer's own feed-forward part. How weights are chosen: DeepSeek-V3, arXiv:2412.19437,
// section 2.1.2, and what others leave out of it.
enum class Score : Word { softmax = 0, sigmoid = 1, softmax_chosen = 2 };

struct Experts {
  Matrix router;               // [count (+ 1: the gate of the layer's own part)]
  const Matrix *up, *down;     // [held] each: of experts [first, first + held)
  Word count, chosen, first, held;
  Word groups, chosen_groups, pair;  // pair: a group's score is the sum of its best two, else its best
  Score score;
  Word normalized;
  double scale;
  const float *correction;     // [count], added to scores for choosing only; null: none
  double clamp, alpha;         // clamp > 0: (value + 1) * gate * sigmoid(alpha * gate), both cut at it before
  Word own_gated;              // the layer's own part is multiplied by a sigmoid of logit `count`
};

// Keys and values that are made from `rank` numbers a token: DeepSeek-V2, arXiv:2405.04434, section 2.1. The layer's qkv makes (queries,
// or `small` numbers that query_up makes them of; the latent; the rotated part of the key). The cache holds latent and rotated part.
// Queries go to the latent's space by key_up, and weighted sums of latents become values by value_up.
struct Latent {
  Normed query_norm, norm;          // of the small numbers; of latents
  Matrix query_up;                  // no data: qkv makes queries
  const Matrix *key_up, *value_up;  // [heads]: [rank, plain] and [value_width, rank] each
  Word rank, plain, rotated, small, value_width;
};

struct Layer {
  Normed before_attention, after_attention, before_feed, after_feed, query_norm, key_norm;
  Matrix qkv, out, up, down;  // gated: units of `up` are gate and value in turn; no data: there are only experts
  Word heads, kv_heads, width, value_width;
  double scale, softcap;  // softcap 0: none
  Word window;            // 0: none
  const float *slopes, *sinks;  // [heads], null: none
  Word rope, rope_dim, interleaved;  // rope: which tables, -1: none
  Word whole;     // query and key norms are over all heads at once
  Word norm_each, norm_late;  // those of heads: each head has weights of its own; they come after the rotation
  double clip;      // queries, keys and values are cut to [-clip, clip]; 0: not
  double residual;  // outputs of both parts are multiplied by it
  Word parallel;  // attention and feed-forward part read the same x
  Word after;     // norms follow the residual instead of preceding it
  Word activation, gated;
  const Experts *experts;  // null: none
  const Latent *latent;    // null: none. Else width is rank + rotated, value_width is rank, and kv_heads says how heads are dealt out:
                           // all read the one key of a token, and the first `rank` numbers of it are the value
  void *keys, *values;  // [blocks, size, kv_heads, width]; of a latent [blocks, size, 1, width], no values
  float *key_scales, *value_scales;  // [blocks, size, kv_heads], int8 only
};

struct Chunk {
  Word first, count, start;  // first row, rows, position of the first
  const Word *blocks;        // of the sequence
};

// Sums n floats over the ranks that hold parts of the layers, in place; false: one of them failed, and `ranks` knows which.
using Sum = bool (*)(void *ranks, float *x, Word n);

struct Step {
  float *x;  // [rows, hidden]: embeddings; overwritten
  Word rows, hidden;
  const Layer *layers;
  Word num_layers;
  Normed last;
  Matrix head;
  const Word *outputs;  // [num_outputs] rows whose logits are wanted
  Word num_outputs;
  float *logits;  // [num_outputs, head.n]
  const Chunk *chunks;
  Word num_chunks;
  const float *cos, *sin;  // [ropes, rows, rope_stride]
  Word rope_stride;
  Word block_size;
  Kept kept;
  float *scratch;
  Word scratch_floats;
  Sum sum;  // null: one rank. Outputs of `out` and `down` are this rank's parts of a sum
  void *ranks;
};

constexpr Word queries = 64;  // of one call of the attention kernel, unless one row has more

// What a product asks of memory meanwhile: so many lines of 64 bytes with every eight inputs, one after the other.
struct Ahead {
  const char *from = nullptr;
  int lines = 0;
};

// What such a call computes: `rows` rows of a chunk for `kv_heads` heads of keys from `kv_head` on.
struct Attend {
  const Chunk *chunk;
  Word row, rows, kv_head, kv_heads;
  const float *qkv;
  Word qkv_stride;
  float *out;
  Word out_stride;
  const Attend *next;  // what this thread does after it, so that its first keys are asked for in time; null: nothing
};

static_assert(sizeof(Matrix) == 8 * 8 && sizeof(Normed) == 5 * 8 && sizeof(Chunk) == 4 * 8 && sizeof(Layer) == 89 * 8 && sizeof(Latent) == 25 * 8 && sizeof(Experts) == 24 * 8 && sizeof(Step) == 32 * 8);

// Floats of scratch that `run` needs for such a step.
Word scratch_floats(const Step &s, int threads);

// Cost: every weight read once for each block of rows whose inputs stay in the second-level cache, the keys and values of each chunk's sequence once for
// each 64 / (heads / kv_heads) rows; 4 barriers a layer where threads can take whole heads, else 6. Sources: Dao et al. 2023 (the running softmax), Kwon et al. 2023
// (blocks).
Status run(const Step &s, int threads);

// y [rows, m.n] = x [rows, m.k] times the matrix, and its bias. fp32, contiguous, aligned to floats; in the padded n and k.
// scratch: `product_scratch` floats. Cost: as that of a matrix of `run`. Source: Goto and van de Geijn 2008 (panels and blocks).
Word product_scratch(const Matrix &m, Word rows);
Status product(const Matrix &m, const float *x, Word rows, float *y, float *scratch, int threads);

}  // namespace ds::decoder
