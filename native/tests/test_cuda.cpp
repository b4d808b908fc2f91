// The CUDA kernels, run by tests/emulated.h, against the CPU's: the same bits wherever both define them.
#include "cuda.h"

#include <vector>

#include "check.h"
#include "kernels/table.h"

namespace {

using ds::Dtype;
using ds::Rule;
using ds::Status;

constexpr Dtype all_types[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

// `n` values of a stored type, from an address that is a multiple of the element only.
struct Stored {
  Dtype dtype;
  std::vector<unsigned char> bytes;
  std::int64_t shift;
  Stored(Dtype d, std::int64_t n, Random &r, bool positive = false, std::int64_t elements_off = 0)
      : dtype(d), bytes(static_cast<std::size_t>((n + elements_off) * ds::size_of(d) + 1)), shift(elements_off * ds::size_of(d)) {
    for (std::int64_t i = 0; i < n; i++) {
      float x = r.unit();
      if (positive && x < 0) x = -x;
      const float wide[1] = {x};
      CHECK(ds::convert(at(i), d, wide, Dtype::f32, 1, 1.0f, 1) == Status::ok);
    }
  }
  unsigned char *at(std::int64_t i) { return bytes.data() + shift + i * ds::size_of(dtype); }
};

void conversions_agree() {
  std::vector<std::uint16_t> half(65536), theirs(65536), ours(65536);
  std::vector<float> a(65536), b(65536);
  for (std::size_t i = 0; i < 65536; i++) half[i] = static_cast<std::uint16_t>(i);
  for (Dtype d : {Dtype::bf16, Dtype::f16}) {
    CHECK(ds::convert(a.data(), Dtype::f32, half.data(), d, 65536, 1.0f, 1) == Status::ok);
    CHECK(ds::cuda::convert(b.data(), Dtype::f32, half.data(), d, 65536, 1.0f, 0) == Status::ok);
    for (std::size_t i = 0; i < 65536; i++) CHECK(a[i] != a[i] ? b[i] != b[i] : !std::memcmp(&a[i], &b[i], 4));
    for (std::uint32_t low : {0x0u, 0x1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      for (std::uint32_t i = 0; i < 65536; i++) {
        const std::uint32_t u = i << 16 | low;
        std::memcpy(&a[i], &u, 4);
      }
      CHECK(ds::convert(theirs.data(), d, a.data(), Dtype::f32, 65536, 1.0f, 1) == Status::ok);
      CHECK(ds::cuda::convert(ours.data(), d, a.data(), Dtype::f32, 65536, 1.0f, 0) == Status::ok);
      for (std::size_t i = 0; i < 65536; i++)
        if (a[i] == a[i]) CHECK(theirs[i] == ours[i]);
    }
  }
}

struct Problem {  // tensors of several sizes, one stream a row
  std::vector<std::vector<Stored>> streams;
  Problem(const std::vector<std::int64_t> &sizes, const Dtype (&types)[5], std::int64_t shift) {
    Random r{77};
    for (int s = 0; s < 5; s++) {
      streams.emplace_back();
      for (std::int64_t n : sizes) streams.back().emplace_back(types[s], n, r, s == 3, shift);
    }
  }
};

void updates_agree() {
  const std::vector<std::int64_t> sizes = {0, 1, 5, 0, 8191, 8192, 8193, 1027, 0};
  const auto count = static_cast<std::int64_t>(sizes.size());
  const float c[ds::max_coefficients] = {0.999f, 0.01f, 0.1f, 0.99f, 0.01f, 0.003f, 0.2f, 1e-8f, 1.11f, 1.01f, 1.001f, 0.31f};
  std::vector<float> ratio(sizes.size(), 0.7f);
  for (int rule = 0; rule <= 7; rule++)
    for (std::int64_t shift : {0, 1, 3})
      for (int mix = 0; mix < 3; mix++) {
        const Dtype p = all_types[mix], g = all_types[(mix + 1) % 3], s = all_types[shift ? mix : 0], copy = all_types[(mix + 2) % 3];
        const Dtype types[5] = {p, g, s, s, copy};
        Problem ours(sizes, types, shift), theirs(sizes, types, shift);
        const bool moments = rule == static_cast<int>(Rule::lamb_moments);
        ds::Update u = {};
        u.rule = static_cast<Rule>(rule);
        u.zero_grad = rule % 2 == 1;
        u.grad_scale = 0.5f;
        std::memcpy(u.c, c, sizeof c);
        u.ratio = ratio.data();
        std::vector<std::int64_t> rows(7 * sizes.size());
        std::int64_t chunks = 0, blocks = 0;
        for (std::int64_t t = 0; t < count; t++) {
          const std::int64_t n = sizes[static_cast<std::size_t>(t)];
          rows[static_cast<std::size_t>(t)] = n;
          rows[static_cast<std::size_t>(6 * count + t)] = chunks;
          chunks += (n + ds::cuda::update_chunk - 1) / ds::cuda::update_chunk;
          blocks += (n + ds::update_block - 1) / ds::update_block;
        }
        std::vector<double> sums(static_cast<std::size_t>(2 * chunks)), expected(static_cast<std::size_t>(2 * blocks));
        auto point = [&](Problem &x) {
          for (std::int64_t k = 0; k < 5; k++)
            for (std::int64_t t = 0; t < count; t++)
              rows[static_cast<std::size_t>((k + 1) * count + t)] =
                  k == 4 && moments ? 0 : reinterpret_cast<std::int64_t>(x.streams[static_cast<std::size_t>(k)][static_cast<std::size_t>(t)].at(0));
        };
        point(theirs);
        const std::int64_t *row = rows.data();
        u.partials = moments ? expected.data() : nullptr;
        u.list = {count, row, row + count, row + 2 * count, row + 3 * count, row + 4 * count, moments ? nullptr : row + 5 * count, p, g, s, copy};
        CHECK(ds::update(u, 1) == Status::ok);
        point(ours);
        u.partials = moments ? sums.data() : nullptr;
        const float half = 0.5f;
        if (shift == 1) u.grad_scale = 1.0f, u.scale = &half;  // the same factor, beside the tensors
        CHECK(ds::cuda::update(u, rows.data(), chunks, 0) == Status::ok);
        for (std::size_t k = 0; k < 5; k++)
          for (std::size_t t = 0; t < sizes.size(); t++) CHECK(ours.streams[k][t].bytes == theirs.streams[k][t].bytes);
        double a[2] = {0, 0}, b[2] = {0, 0};
        for (std::size_t i = 0; i < sums.size(); i++) a[i % 2] += sums[i];
        for (std::size_t i = 0; i < expected.size(); i++) b[i % 2] += expected[i];
        if (moments)
          for (int i = 0; i < 2; i++) CHECK(std::fabs(a[i] - b[i]) <= 1e-12 * b[i]);
      }
}

void passes_agree() {
  for (Dtype d : all_types)
    for (std::int64_t n : {0, 1, 3, 4, 5, 1023, 1024, 8193, 20001}) {
      Random r{static_cast<std::uint64_t>(n) + 1};
      Stored x(d, n, r, false, 1);
      std::vector<double> partials(static_cast<std::size_t>(ds::cuda::sum_blocks)), scratch(static_cast<std::size_t>(n / ds::norm_block + 1));
      double want = 0.0, got = 0.0;
      CHECK(ds::sum_squares(x.at(0), d, n, scratch.data(), &want, 1) == Status::ok);
      CHECK(ds::cuda::sum_squares(x.at(0), d, n, partials.data(), 0) == Status::ok);
      for (double p : partials) got += p;
      CHECK(std::fabs(got - want) <= 1e-12 * want);
      Stored y = x;
      CHECK(ds::fill(x.at(0), d, n, 0.3f, 1) == Status::ok);
      CHECK(ds::cuda::fill(y.at(0), d, n, 0.3f, 0) == Status::ok);
      CHECK(x.bytes == y.bytes);
    }
}

void quantizers_agree() {
  const ds::QuantFormat formats[] = {{8, -1, 0, 127, 127.0f},    {4, -1, 0, 7, 7.0f},     {8, 3, 7, 0x7e, 448.0f},
                                     {8, 2, 15, 0x7b, 57344.0f}, {6, 2, 3, 0x1f, 28.0f}, {6, 3, 1, 0x1f, 7.5f},
                                     {4, 1, 1, 7, 6.0f}};
  for (const ds::QuantFormat &f : formats)
    for (int variant = 0; variant < 4; variant++)
      for (std::int64_t group : {12, 256})
        for (std::int64_t cols : {0, 1, 7, 255, 257, 700}) {
          ds::QuantSpec s = {f, variant % 2 == 0, variant / 2 == 1, {123u, 456u}, (1ll << 32) - 50, group};
          if (f.mantissa >= 0 && !s.symmetric) continue;
          if (f.bits == 4 && group == 12) s.group = 6;  // a lane's four codes in two groups
          constexpr std::int64_t rows = 4;
          const std::int64_t params_at = ((cols * f.bits + 7) / 8 + 3) / 4 * 4;
          const std::int64_t row_bytes = params_at + 4 * ds::quant_groups(s, cols) * ds::quant_params(s);
          const auto bytes = static_cast<std::size_t>(rows * row_bytes) + 1;
          std::vector<unsigned char> ours(bytes), theirs(bytes);
          const ds::QuantRows q = {ours.data(), rows, cols, params_at, row_bytes}, p = {theirs.data(), rows, cols, params_at, row_bytes};
          Random r{static_cast<std::uint64_t>(cols) + 3};
          const Dtype d = all_types[(cols + variant) % 3];
          Stored x(d, rows * cols, r, false, variant);
          if (cols > 20 && d == Dtype::f32 && variant == 0) {
            const float infinite = INFINITY;
            std::memcpy(x.at(2 * cols + 9), &infinite, 4);
          }
          const std::int64_t order[rows] = {2, 0, 3, 1}, index[3] = {3, 3, 0};
          CHECK(ds::quantize(s, p, order, x.at(0), d, 1) == Status::ok);
          CHECK(ds::cuda::quantize(s, q, order, x.at(0), d, 0) == Status::ok);
          CHECK(ours == theirs);
          Random zeros{0};
          Stored a(d, 3 * cols, zeros, false, 1), b(d, 3 * cols, zeros, false, 1);
          CHECK(ds::dequantize(s, p, index, 3, a.at(0), d, 1) == Status::ok);
          CHECK(ds::cuda::dequantize(s, q, index, 3, b.at(0), d, 0) == Status::ok);
          if (!(variant == 0 && d == Dtype::f32)) CHECK(a.bytes == b.bytes);
          std::vector<float> sum(static_cast<std::size_t>(2 * cols + 1)), expected(sum);
          CHECK(ds::reduce(s, p, 2, 0.3f, expected.data(), Dtype::f32, 1) == Status::ok);
          CHECK(ds::cuda::reduce(s, q, 2, 0.3f, sum.data(), Dtype::f32, 0) == Status::ok);
          for (std::size_t i = 0; i < sum.size(); i++)
            CHECK(sum[i] != sum[i] ? expected[i] != expected[i] : !std::memcmp(&sum[i], &expected[i], 4));
          const ds::QuantSpec wide = {formats[0], true, s.stochastic, {1u, 2u}, 5, 4 * s.group};
          const std::int64_t wide_at = (cols + 3) / 4 * 4, wide_row = wide_at + 4 * ds::quant_groups(wide, cols);
          std::vector<unsigned char> left(static_cast<std::size_t>(2 * wide_row) + 1), right(left);
          std::vector<float> scratch(static_cast<std::size_t>(wide.group));
          CHECK(ds::reduce_quantized(s, p, 2, 0.3f, wide, {right.data(), 2, cols, wide_at, wide_row}, scratch.data(), 1) == Status::ok);
          CHECK(ds::cuda::reduce_quantized(s, q, 2, 0.3f, wide, {left.data(), 2, cols, wide_at, wide_row}, 0) == Status::ok);
          CHECK(left == right);
        }
}

bool near(Stored &a, Stored &b, std::int64_t n) {
  const float tolerance = a.dtype == Dtype::f32 ? 2e-6f : a.dtype == Dtype::bf16 ? 1e-2f : 2e-3f;
  for (std::int64_t i = 0; i < n; i++) {
    float x, y;
    CHECK(ds::convert(&x, Dtype::f32, a.at(i), a.dtype, 1, 1.0f, 1) == Status::ok);
    CHECK(ds::convert(&y, Dtype::f32, b.at(i), b.dtype, 1, 1.0f, 1) == Status::ok);
    if (!(std::fabs(x - y) <= tolerance * (1.0f + std::fabs(y)))) return false;
  }
  return true;
}

void norms_agree() {
  for (Dtype d : all_types)
    for (std::int64_t rows : {1, 5, 600})
      for (std::int64_t cols : {1, 7, 260, 1100, 1024, 2052, 4096, 8192, 8196}) {  // a row in registers of 32 to 256 threads, and not
        if (rows * cols > 10000 && rows != 5) continue;
        Random r{9};
        const std::int64_t n = rows * cols;
        Stored x(d, n, r), residual(d, n, r), dsum(d, n, r), weight(Dtype::f32, cols, r), zero(d, n, r);
        Stored sum_a = zero, sum_b = zero, y_a = zero, y_b = zero, dx_a = zero, dx_b = zero;
        std::vector<float> rstd_a(static_cast<std::size_t>(rows)), rstd_b(rstd_a), scratch(static_cast<std::size_t>(2 * cols));
        std::vector<float> dw_a(static_cast<std::size_t>(ds::norm_grad_blocks * cols)), dw_b(static_cast<std::size_t>(ds::cuda::norm_grad_blocks * cols));
        auto *w = reinterpret_cast<const float *>(weight.at(0));
        CHECK(ds::norm({1e-3, rows, cols, d, x.at(0), residual.at(0), w, sum_a.at(0), y_a.at(0), rstd_a.data()}, scratch.data(), 1) == Status::ok);
        CHECK(ds::cuda::norm({1e-3, rows, cols, d, x.at(0), residual.at(0), w, sum_b.at(0), y_b.at(0), rstd_b.data()}, 0) == Status::ok);
        CHECK(sum_a.bytes == sum_b.bytes);
        CHECK(near(y_b, y_a, n));
        CHECK(ds::norm_grad({rows, cols, d, sum_a.at(0), x.at(0), dsum.at(0), w, rstd_a.data(), dx_a.at(0), dw_a.data()}, scratch.data(), 1) == Status::ok);
        CHECK(ds::cuda::norm_grad({rows, cols, d, sum_a.at(0), x.at(0), dsum.at(0), w, rstd_a.data(), dx_b.at(0), dw_b.data()}, 0) == Status::ok);
        CHECK(near(dx_b, dx_a, n));
        for (std::int64_t i = 0; i < cols; i++) {
          double a = 0, b = 0;
          for (std::int64_t k = 0; k < ds::norm_grad_blocks; k++) a += static_cast<double>(dw_a[static_cast<std::size_t>(k * cols + i)]);
          for (std::int64_t k = 0; k < ds::cuda::norm_grad_blocks; k++) b += static_cast<double>(dw_b[static_cast<std::size_t>(k * cols + i)]);
          CHECK(std::fabs(a - b) <= 1e-5 * (1.0 + std::fabs(a)) * static_cast<double>(rows));
        }
      }
}

}  // namespace

// test_cuda [SEEDS]: as written, then with so many drawn orders of blocks and threads (default 1).
int main(int argc, char **argv) {
  const long seeds = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 1;
  for (long seed = 0; seed <= seeds; seed++) {
    ds::cuda::machine().seed = seed ? 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(seed) : 0;
    conversions_agree();
    updates_agree();
    passes_agree();
    quantizers_agree();
    norms_agree();
  }
  std::printf("CUDA kernels agree with the CPU's, in the order written and in %ld drawn ones\n", seeds);
}
