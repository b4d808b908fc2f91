// Public functions touch exactly the memory they are given (exactly-sized heap blocks, for the sanitizers), give the
// same result on any thread count, and answer bad arguments with a status.
#include <ds/isa.h>
#include <ds/quant.h>
#include <ds/rows.h>
#include <ds/stream.h>
#include <ds/sum.h>
#include <ds/update.h>

#include <cstring>
#include <vector>

#include "check.h"

namespace {

using ds::Dtype;
using ds::Status;

std::vector<std::vector<float>> tensors(const std::vector<std::int64_t> &sizes, std::uint64_t seed) {
  Random r{seed};
  std::vector<std::vector<float>> out;
  for (std::int64_t n : sizes) {
    out.emplace_back(static_cast<std::size_t>(n));
    for (float &v : out.back()) v = r.unit();
  }
  return out;
}

std::vector<std::int64_t> addresses(std::vector<std::vector<float>> &x) {
  std::vector<std::int64_t> out;
  for (auto &v : x) out.push_back(reinterpret_cast<std::int64_t>(v.data()));
  return out;
}

std::vector<std::vector<float>> stepped(const std::vector<std::int64_t> &sizes, int threads) {
  auto p = tensors(sizes, 1), g = tensors(sizes, 2), m = tensors(sizes, 3), v = tensors(sizes, 4);
  for (auto &t : v)
    for (float &x : t) x = x < 0 ? -x : x;
  auto pa = addresses(p), ga = addresses(g), ma = addresses(m), va = addresses(v);
  ds::Update u = {};
  u.rule = ds::Rule::adam;
  u.grad_scale = 1.0f;
  const float c[] = {1.0f, 0.0f, 0.1f, 0.99f, 0.01f, 1e-3f, 0.1f, 1e-8f};
  std::memcpy(u.c, c, sizeof c);
  u.list = {static_cast<std::int64_t>(sizes.size()), sizes.data(), pa.data(), ga.data(), ma.data(), va.data(),
            nullptr, Dtype::f32, Dtype::f32, Dtype::f32, Dtype::f32};
  CHECK(ds::update(u, threads) == Status::ok);
  p.insert(p.end(), m.begin(), m.end());
  p.insert(p.end(), v.begin(), v.end());
  return p;
}

void threads_do_not_matter() {
  const std::vector<std::int64_t> sizes = {0, 1, 70001, 5, 2048, 0, 131072, 3};
  const auto one = stepped(sizes, 1);
  for (int t : {2, 3, 7}) CHECK(stepped(sizes, t) == one);
}

void streams() {
  for (std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{33}, std::int64_t{100003}}) {
    const auto k = static_cast<std::size_t>(n);
    std::vector<float> a(k, 3.0f), b(k, 2.0f), c(k, 4.0f);
    std::vector<ds::Norms> partials(k / ds::norm_block + 1);
    ds::Norms one = {-1, -1}, two = one;
    CHECK(ds::measure(a.data(), Dtype::f32, n, partials.data(), &one, 1) == Status::ok);
    CHECK(ds::measure(a.data(), Dtype::f32, n, partials.data(), &two, 2) == Status::ok);
    CHECK(one.squares == two.squares && one.squares == 9.0 * static_cast<double>(n));
    CHECK(one.peak == two.peak && one.peak == (n ? 3.0 : 0.0));
    std::vector<float> sum(k);
    const void *both[] = {b.data(), c.data()};
    CHECK(ds::sum_sources(sum.data(), both, 2, Dtype::f32, n, partials.data(), &two, 2) == Status::ok);
    CHECK(two.squares == 36.0 * static_cast<double>(n) && two.peak == (n ? 6.0 : 0.0));
    for (float v : sum) CHECK(v == 6.0f);
    std::vector<float> copied(k), part(k / 2);
    const ds::Move moves[] = {{copied.data(), sum.data(), n * 4}, {part.data(), sum.data(), (n / 2) * 4}};
    CHECK(ds::copy_ranges(moves, 2, 2) == Status::ok);
    CHECK(copied == sum);
    for (float v : part) CHECK(v == 6.0f);
    CHECK(ds::triad(a.data(), b.data(), c.data(), n, 0.5f, false, 2) == Status::ok);
    for (float v : a) CHECK(v == 4.0f);
    std::vector<std::uint16_t> half(k);
    CHECK(ds::convert(half.data(), Dtype::bf16, a.data(), Dtype::f32, n, 0.5f, 2) == Status::ok);
    for (std::uint16_t h : half) CHECK(h == 0x4000);
    CHECK(ds::fill(half.data(), Dtype::f16, n, 1.0f, 2) == Status::ok);
    for (std::uint16_t h : half) CHECK(h == 0x3c00);
  }
}

// Rows of every width of code, also shorter than one step of packing, in blocks of exactly their size.
void quantizers() {
  const ds::QuantFormat formats[] = {{8, -1, 0, 127, 127.0f}, {4, -1, 0, 7, 7.0f}, {6, 2, 3, 0x1f, 28.0f}, {4, 1, 1, 7, 6.0f}};
  constexpr std::int64_t sources = 9;  // one more than is summed in registers at once
  for (const ds::QuantFormat &f : formats)
    for (int stochastic = 0; stochastic < 2; stochastic++)
      for (std::int64_t n : {1, 3, 15, 16, 17, 31, 33, 64, 65, 511, 512, 513, 515, 1100}) {
        ds::QuantSpec spec = {};
        spec.format = f;
        spec.symmetric = true;
        spec.stochastic = stochastic != 0;
        spec.group = 512;
        spec.offset = (std::int64_t{1} << 32) - 40;
        const std::int64_t params_at = (n * f.bits + 31) / 32 * 4, row = params_at + ds::quant_groups(spec, n) * 4;
        std::vector<unsigned char> wire(static_cast<std::size_t>(sources * row), 0);
        const auto x = tensors({sources * n}, 5)[0];
        const ds::QuantRows q = {wire.data(), sources, n, params_at, row};
        CHECK(ds::quantize(spec, q, nullptr, x.data(), Dtype::f32, 1) == Status::ok);
        std::vector<float> back(static_cast<std::size_t>(sources * n)), sum(static_cast<std::size_t>(n));
        CHECK(ds::dequantize(spec, q, nullptr, sources, back.data(), Dtype::f32, 1) == Status::ok);
        CHECK(ds::reduce(spec, q, sources, 1.0f, sum.data(), Dtype::f32, 1) == Status::ok);
        for (std::size_t i = 0; i < sum.size(); i++) {
          float total = 0;
          for (std::size_t k = 0; k < sources; k++) total = total + back[k * sum.size() + i];
          CHECK(total == sum[i]);
        }
        for (std::size_t i = 0; i < x.size(); i++) CHECK(back[i] - x[i] < 0.35f && x[i] - back[i] < 0.35f);
      }
}

// Rows of every width, picked by number; more terms than the kernel keeps addresses of.
void picked_rows() {
  for (std::int64_t cols : {1, 7, 16, 33, 100})
    for (std::int64_t each : {0, 1, 2, 19}) {
      constexpr std::int64_t rows = 9, n = 13;
      const auto x = tensors({rows * cols}, 3)[0], w = tensors({n * each}, 4)[0];
      std::vector<std::int64_t> index;
      for (std::int64_t i = 0; i < n * each; i++) index.push_back(i * 5 % rows);
      std::vector<float> sums(static_cast<std::size_t>(n * cols)), picked(static_cast<std::size_t>(n * each * cols));
      for (int threads : {1, 2}) {
        CHECK(ds::sum_rows(sums.data(), x.data(), Dtype::f32, rows, cols, index.data(), w.data(), n, each, threads) == Status::ok);
        CHECK(ds::gather_rows(picked.data(), x.data(), rows, cols * 4, index.data(), n * each, 1, threads) == Status::ok);
        for (std::int64_t i = 0; i < n; i++)
          for (std::int64_t c = 0; c < cols; c++) {
            double sum = 0;
            for (std::int64_t e = i * each; e < (i + 1) * each; e++) {
              const float one = x[static_cast<std::size_t>(index[static_cast<std::size_t>(e)] * cols + c)];
              CHECK(picked[static_cast<std::size_t>(e * cols + c)] == one);
              sum += static_cast<double>(w[static_cast<std::size_t>(e)]) * one;
            }
            const double off = sums[static_cast<std::size_t>(i * cols + c)] - sum;
            CHECK(off < 1e-5 && off > -1e-5);
          }
      }
    }
  float x[4] = {1, 2, 3, 4}, out[4] = {};
  const std::int64_t good[] = {1, 0, 3, 2}, high[] = {0, 2}, low[] = {0, -1};
  CHECK(ds::gather_rows(out, x, 2, 4, good, 4, 2, 1) == Status::ok);  // rows 0, 0, 1, 1
  CHECK(out[0] == 1 && out[1] == 1 && out[2] == 2 && out[3] == 2);
  for (const std::int64_t *bad : {high, low}) {
    CHECK(ds::gather_rows(out, x, 2, 4, bad, 2, 1, 1) == Status::bad_argument);
    CHECK(ds::sum_rows(out, x, Dtype::f32, 2, 1, bad, nullptr, 1, 2, 1) == Status::bad_argument);
  }
  CHECK(out[0] == 1);
}

void bad_arguments() {
  ds::Update u = {};
  u.list.count = 1;
  CHECK(ds::update(u, 1) == Status::bad_argument);
  ds::Norms out = {};
  CHECK(ds::measure(nullptr, Dtype::f32, 5, nullptr, &out, 1) == Status::bad_argument);
  CHECK(ds::sum_sources(nullptr, nullptr, 0, Dtype::f32, 5, nullptr, &out, 1) == Status::bad_argument);
  CHECK(ds::fill(nullptr, Dtype::f32, -1, 0, 1) == Status::bad_argument);
  const ds::Move nowhere{nullptr, &out, 8}, less{&out, nullptr, -1};
  CHECK(ds::copy_ranges(&nowhere, 1, 1) == Status::bad_argument);
  CHECK(ds::copy_ranges(&less, 1, 1) == Status::bad_argument);
  float x = 0;
  CHECK(ds::convert(&x, Dtype::bf16, &x, Dtype::f32, 1, 1.0f, 1) == Status::bad_argument);
}

}  // namespace

int main() {
  threads_do_not_matter();
  streams();
  quantizers();
  picked_rows();
  bad_arguments();
  std::printf("level %s of %s\n", ds::isa_name(), ds::isa_supported());
}
