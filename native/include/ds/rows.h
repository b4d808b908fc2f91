// Rows of a matrix that are picked by number: copied, or summed with weights.
#pragma once
#include <ds/types.h>

namespace ds {

// out [n, row_bytes]: row i is row index[i] / per of x [rows, row_bytes], of any element type. Nothing overlaps. bad_argument, and nothing
// written, if an index leads outside of x. Cost: one read and one write of what is picked. Source: the gather of Gale et al. 2022.
Status gather_rows(void *out, const void *x, std::int64_t rows, std::int64_t row_bytes, const std::int64_t *index, std::int64_t n,
                   std::int64_t per, int threads);

// out [n, cols]: row i is the sum over c of weights[i, c] * x[index[i, c]] of x [rows, cols], in fp32, c ascending, one rounding a term
// (FMA), rounded to `dtype` at the end. index, weights [n, each], weights fp32 or null: ones. Nothing overlaps. Errors as above. Cost: one
// read of each picked row, one write of out. Source: the combine of Gale et al. 2022.
Status sum_rows(void *out, const void *x, Dtype dtype, std::int64_t rows, std::int64_t cols, const std::int64_t *index,
                const float *weights, std::int64_t n, std::int64_t each, int threads);

}  // namespace ds
