// Products of packed weights: every level, every kind, any number of rows, against plain loops. A layer of experts: the same.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "kernels/table.h"
#include "routing.h"

namespace {

using namespace ds::decoder;

struct Packing {
  std::vector<std::uint32_t> words;
  std::vector<float> params, numbers;  // numbers [32][k]: what the codes mean
  Matrix matrix;
};

Packing make(Kind kind, Inputs inputs, Word k, Word group, Random &r) {
  Packing p;
  const Word bits = kind == Kind::f32 ? 32 : kind == Kind::bf16 ? 16 : kind == Kind::int8 ? 8 : 4;
  const Word each = 32 / bits, groups = (k + group - 1) / group;
  p.words.assign(static_cast<std::size_t>(k / each * 32), 0);
  p.numbers.assign(static_cast<std::size_t>(32 * k), 0.0f);
  p.params.assign(static_cast<std::size_t>(groups * 64), 0.0f);
  for (Word g = 0; g < groups; g++)
    for (Word n = 0; n < 32; n++) {
      p.params[static_cast<std::size_t>(g * 64 + n)] = 0.01f * (1.0f + r.unit() * 0.5f);
      p.params[static_cast<std::size_t>(g * 64 + 32 + n)] = static_cast<float>(r.bits() % (kind == Kind::int8 ? 256 : 16));
    }
  for (Word i = 0; i < k; i++)
    for (Word n = 0; n < 32; n++) {
      float x = r.unit();
      std::uint32_t u;
      std::memcpy(&u, &x, 4);
      std::uint32_t &word = p.words[static_cast<std::size_t>(i / each * 32 + n)];
      if (kind == Kind::f32) {
        word = u;
      } else if (kind == Kind::bf16) {
        u &= 0xffff0000u;
        word |= i % 2 ? u : u >> 16;
        std::memcpy(&x, &u, 4);
      } else {
        const std::uint32_t code = r.bits() >> (32 - bits);
        const Word shift = kind == Kind::int8 ? 8 * (i % 4) : 8 * (i % 4) + (i % 8 >= 4 ? 4 : 0);
        word |= code << shift;
        const float *param = p.params.data() + i / group * 64 + n;
        x = (static_cast<float>(code) - param[32]) * param[0];
      }
      p.numbers[static_cast<std::size_t>(n * k + i)] = x;
    }
  p.matrix = {p.words.data(), p.params.data(), nullptr, 32, k, group, kind, inputs};
  return p;
}

void products_are_right(const ds::Kernels &level, Kind kind, Inputs inputs, Word k, Word group, int rows) {
  Random r{static_cast<std::uint64_t>(k * 100 + rows)};
  const Packing p = make(kind, inputs, k, group, r);
  const Word tall = rows <= 4 ? rows : panel_rows;
  std::vector<float> x(static_cast<std::size_t>(rows * k)), out(static_cast<std::size_t>(tall * 32));
  for (float &v : x) v = r.unit();
  std::vector<char> panel(static_cast<std::size_t>(level.panel_bytes(p.matrix, tall)));
  for (int t = 0; t < rows; t++) level.panel_row(p.matrix, x.data() + t * k, panel.data(), tall, t);
  level.dense(p.matrix, 0, panel.data(), tall, rows, out.data(), {});
  for (int t = 0; t < rows; t++)
    for (Word n = 0; n < 32; n++) {
      double sum = 0.0, size = 0.0;
      for (Word i = 0; i < k; i++) {
        const double w = p.numbers[static_cast<std::size_t>(n * k + i)], v = x[static_cast<std::size_t>(t * k + i)];
        sum += w * v;
        size += std::fabs(w);
      }
      // Inputs rounded to 8 bits are off by at most half of 1/127 of the largest, which is at most 1.
      // Rounded to bf16, each by at most 1/256 of itself.
      const double allowed = inputs == Inputs::int8   ? size / 254.0 + 1e-3
                             : inputs == Inputs::bf16 ? size / 256.0 + 1e-3
                                                      : 1e-5 * static_cast<double>(k);
      CHECK(std::fabs(sum - static_cast<double>(out[static_cast<std::size_t>(t * 32 + n)])) <= allowed);
    }
}

// ---- experts

struct Plain {
  Word n, k;                   // not padded
  std::vector<float> numbers;  // [n][k]
  std::vector<float> packed;
  Matrix matrix;
  Plain(Word n_, Word k_, bool gated, Random &r) : n(n_), k(k_), numbers(static_cast<std::size_t>(n * k)) {
    for (float &v : numbers) v = r.unit() * 0.3f;
    const Word halves = gated ? 2 : 1, each = (n / halves + 31) / 32, deep = (k + 7) / 8 * 8;
    packed.assign(static_cast<std::size_t>(halves * each * 32 * deep), 0.0f);
    for (Word o = 0; o < n; o++) {
      const Word half = o / (n / halves), at = o % (n / halves), unit_number = at / 32 * halves + half;
      for (Word i = 0; i < k; i++)
        packed[static_cast<std::size_t>((unit_number * deep + i) * 32 + at % 32)] = numbers[static_cast<std::size_t>(o * k + i)];
    }
    matrix = {packed.data(), nullptr, nullptr, halves * each * 32, deep, deep, Kind::f32, Inputs::f32};
  }
  std::vector<float> times(const std::vector<float> &x) const {
    std::vector<float> y(static_cast<std::size_t>(n));
    for (Word o = 0; o < n; o++)
      for (Word i = 0; i < k; i++) y[static_cast<std::size_t>(o)] += numbers[static_cast<std::size_t>(o * k + i)] * x[static_cast<std::size_t>(i)];
    return y;
  }
};

std::vector<float> gated(const Plain &up, const Plain &down, const std::vector<float> &x) {
  const std::vector<float> both = up.times(x);
  std::vector<float> mid(both.size() / 2);
  for (std::size_t i = 0; i < mid.size(); i++) mid[i] = both[i] / (1.0f + std::exp(-both[i])) * both[i + mid.size()];
  return down.times(mid);
}

void choices_are_the_best(Word groups, Score score) {
  Random r{static_cast<std::uint64_t>(groups)};
  Experts e = {};
  e.count = 12, e.chosen = 3, e.held = 5, e.first = 4, e.groups = groups, e.chosen_groups = 2, e.pair = 1, e.score = score;
  e.normalized = 1, e.scale = 2.0;
  constexpr Word rows = 7;
  std::vector<float> logits(static_cast<std::size_t>(rows * e.count)), correction(12), work(24), weight(rows * 3);
  for (float &v : logits) v = r.unit() * 4.0f - 2.0f;
  for (float &v : correction) v = r.unit();
  e.correction = score == Score::sigmoid ? correction.data() : nullptr;
  std::vector<std::int32_t> expert(rows * 3), slot(rows * 3), ends(5);
  for (Word t = 0; t < rows; t++) {
    const float *row = logits.data() + t * e.count;
    choose(e, row, expert.data() + t * 3, weight.data() + t * 3, work.data());
    const auto value = [&](Word i) {
      const float x = row[i];
      if (score == Score::softmax_chosen) return x;
      return score == Score::sigmoid ? 1.0f / (1.0f + std::exp(-x)) + correction[static_cast<std::size_t>(i)] : std::exp(x);
    };
    std::vector<std::pair<float, Word>> by_group, all;
    for (Word g = 0; g < groups; g++) {
      std::vector<float> own;
      for (Word i = g * 12 / groups; i < (g + 1) * 12 / groups; i++) own.push_back(value(i));
      std::sort(own.rbegin(), own.rend());
      by_group.push_back({own[0] + own[1], g});
    }
    std::sort(by_group.rbegin(), by_group.rend());
    for (Word j = 0; j < (groups > 1 ? 2 : 1); j++) {
      const Word g = by_group[static_cast<std::size_t>(j)].second;
      for (Word i = g * 12 / groups; i < (g + 1) * 12 / groups; i++) all.push_back({value(i), i});
    }
    std::sort(all.rbegin(), all.rend());
    float sum = 0.0f;
    for (Word c = 0; c < 3; c++) {
      CHECK(expert[static_cast<std::size_t>(t * 3 + c)] == all[static_cast<std::size_t>(c)].second);
      sum += weight[static_cast<std::size_t>(t * 3 + c)];
    }
    CHECK(std::fabs(sum - 2.0f) < 1e-5f);
  }
  const Routed routed = {expert.data(), slot.data(), ends.data(), weight.data(), work.data()};
  sort_slots(e, rows, routed);
  Word at = 0;
  for (std::int32_t x = 0; x < 5; x++)
    for (std::int32_t s = 0; s < rows * 3; s++)
      if (expert[static_cast<std::size_t>(s)] == x + 4) CHECK(slot[static_cast<std::size_t>(at++)] == s);
  CHECK(ends[4] == at);
}

// One layer whose attention adds nothing: x + shared(norm x) * gate + the weighted sum of experts.
void experts_are_right(Word rows, int threads, bool shared) {
  constexpr Word hidden = 40, inner = 21, count = 5;
  Random r{static_cast<std::uint64_t>(rows * 10 + threads)};
  const Plain qkv(3 * 8, hidden, false, r), router(count + 1, hidden, false, r);
  const Plain own_up(2 * inner, hidden, true, r), own_down(hidden, inner, false, r);
  Plain out(hidden, 8, false, r);
  std::fill(out.packed.begin(), out.packed.end(), 0.0f);
  std::vector<Plain> up, down;
  std::vector<Matrix> ups, downs;
  for (Word e = 0; e < count; e++) up.emplace_back(2 * inner, hidden, true, r), down.emplace_back(hidden, inner, false, r);
  for (Word e = 0; e < count; e++) {
    up[static_cast<std::size_t>(e)].matrix.data = up[static_cast<std::size_t>(e)].packed.data();
    down[static_cast<std::size_t>(e)].matrix.data = down[static_cast<std::size_t>(e)].packed.data();
    ups.push_back(up[static_cast<std::size_t>(e)].matrix), downs.push_back(down[static_cast<std::size_t>(e)].matrix);
  }
  Experts e = {};
  e.router = router.matrix, e.up = ups.data(), e.down = downs.data(), e.count = count, e.chosen = 2, e.held = count, e.groups = 1;
  e.chosen_groups = 1, e.scale = 0.5, e.own_gated = shared;
  std::vector<float> keys(static_cast<std::size_t>(rows * 8)), values(keys.size()), ones(hidden, 1.0f);
  Layer y = {};
  y.before_attention = y.before_feed = {ones.data(), nullptr, 1e-5, 0.0, 0};
  y.qkv = qkv.matrix, y.out = out.matrix;
  if (shared) y.up = own_up.matrix, y.down = own_down.matrix;
  y.heads = y.kv_heads = 1, y.width = y.value_width = 8, y.scale = 1.0, y.rope = -1, y.residual = 1.0, y.gated = 1;
  y.experts = &e, y.keys = keys.data(), y.values = values.data();
  std::vector<float> x(static_cast<std::size_t>(rows * hidden));
  for (float &v : x) v = r.unit();
  const std::vector<float> before = x;
  Word block = 0;
  const Chunk chunk = {0, rows, 0, &block};
  Step s = {};
  s.x = x.data(), s.rows = rows, s.hidden = hidden, s.layers = &y, s.num_layers = 1, s.chunks = &chunk, s.num_chunks = 1;
  s.block_size = rows;
  std::vector<float> scratch(static_cast<std::size_t>(scratch_floats(s, threads)));
  s.scratch = scratch.data(), s.scratch_floats = static_cast<Word>(scratch.size());
  CHECK(run(s, threads) == ds::Status::ok);
  for (Word t = 0; t < rows; t++) {
    std::vector<float> row(before.begin() + t * hidden, before.begin() + (t + 1) * hidden), sum = row;
    float square = 0.0f;
    for (float v : row) square += v * v;
    for (float &v : row) v /= std::sqrt(square / hidden + 1e-5f);
    std::vector<float> logits = router.times(row), work(2 * count), weight(2);
    std::vector<std::int32_t> chosen(2);
    choose(e, logits.data(), chosen.data(), weight.data(), work.data());
    const auto add = [&](const std::vector<float> &part, float by) {
      for (std::size_t i = 0; i < sum.size(); i++) sum[i] += part[i] * by;
    };
    if (shared) add(gated(own_up, own_down, row), 1.0f / (1.0f + std::exp(-logits[count])));
    for (std::size_t c = 0; c < 2; c++) {
      const auto number = static_cast<std::size_t>(chosen[c]);
      add(gated(up[number], down[number], row), weight[c]);
    }
    for (Word i = 0; i < hidden; i++)
      CHECK(std::fabs(sum[static_cast<std::size_t>(i)] - x[static_cast<std::size_t>(t * hidden + i)]) < 1e-3f);
  }
}

}  // namespace

int main() {
  for (Score score : {Score::softmax, Score::sigmoid, Score::softmax_chosen})
    for (Word groups : {1, 3}) choices_are_the_best(groups, score);
  for (Word rows : {1, 4, 5, 40})
    for (int threads : {1, 2, 3})
      for (bool shared : {false, true}) experts_are_right(rows, threads, shared);
  const ds::Kernels *levels[4];
  const int count = ds::supported_kernels(levels, 4);
  for (int l = 0; l < count; l++)
    for (int rows = 1; rows <= 12; rows++)
      for (Word k : {8, 24, 136}) {
        products_are_right(*levels[l], Kind::f32, Inputs::f32, k, k, rows);
        products_are_right(*levels[l], Kind::bf16, Inputs::f32, k, k, rows);
        products_are_right(*levels[l], Kind::bf16, Inputs::bf16, k, k, rows);
        for (Kind kind : {Kind::int8, Kind::int4})
          for (Inputs inputs : {Inputs::f32, Inputs::int8})
            for (Word group : {Word{16}, k}) products_are_right(*levels[l], kind, inputs, k, group, rows);
      }
  return 0;
}
