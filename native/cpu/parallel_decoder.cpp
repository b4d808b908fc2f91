// The loop over layers: one team of threads for the whole step, which meets at a counter.
#include <ds/decoder.h>

#include <cmath>
#include <cstring>

#include "decoder_room.h"
#include "kernels/table.h"
#include "parallel.h"
#include "products.h"
#include "routing.h"

namespace ds::decoder {

namespace {

// What one thread needs for a step.
struct Thread {
  const Step &s;
  const Kernels &k;
  const Room &room;
  Meeting &meeting;
  int me, team;
  float *x, *qkv, *mixed, *middle, *more;  // shared, [rows, .]
  float *normed, *logits, *of_slots;       // shared, of experts: [rows, .], [rows, .], [slots, .]
  float *wide;                             // shared, of latents: [rows, .]
  char *shared, *shared2;                  // panels
  float *row, *tile, *attend;              // own
  char *own, *gathered;
  float *routing;

  struct Prepared {
    const char *panels;
    Word tall, bytes;  // of one panel
  };

  // Rows [rows] of `from` (with a norm, if it has a weight) as the matrix reads them.
  Prepared prepare(const Matrix &m, const Normed &n, const float *from, Word stride, Word size, Word rows, char *to,
                   const Word *picked = nullptr) {
    const bool few = rows <= few_rows;
    const Word tall = few ? rows : panel_rows, bytes = k.panel_bytes(m, tall);
    char *base = few ? own : to;
    const Range part = few ? Range{0, rows} : part_of(rows, tall, me, team);
    for (Word r = part.begin; r < part.end; r++) {
      const float *source = from + (picked ? picked[r] : r) * stride;
      if (n.weight) {
        k.decoder_norm(n, source, size, row);
        source = row;
      }
      if (m.k > size) {
        if (source != row) std::memcpy(row, source, static_cast<std::size_t>(size) * 4);
        std::memset(row + size, 0, static_cast<std::size_t>(m.k - size) * 4);
        source = row;
      }
      k.panel_row(m, source, base + r / tall * bytes, tall, r % tall);
    }
    if (!few) meeting.wait();
    return {base, tall, bytes};
  }

  // f(row, first output, 32 sums[, 32 more sums of the next unit]) for every row and unit of a product.
  template <class F>
  void product(const Matrix &m, const Prepared &p, Word rows, Word pair, const F &f) {
    product(m, p, rows, pair, part_of(m.n / (unit * pair), 1, me, team), f);
  }
  template <class F>
  void product(const Matrix &m, const Prepared &p, Word rows, Word pair, const Range &part, const F &f) {
    const Word block = block_panels(p.bytes) * p.tall;
    for (Word first = 0; first < rows; first += block) {
      const Word passes = ((rows - first < block ? rows - first : block) + p.tall - 1) / p.tall;
      for (Word u = part.begin; u < part.end; u++)
        for (Word r = first; r < rows && r < first + block; r += p.tall) {
          const int count = static_cast<int>(rows - r < p.tall ? rows - r : p.tall);
          for (Word half = 0; half < pair; half++)
            k.dense(m, u * pair + half, p.panels + r / p.tall * p.bytes, p.tall, count, tile + half * panel_rows * unit,
                    ahead_of(m, (u + 1) * pair + half, part.end * pair, (r - first) / p.tall, passes));
          for (int i = 0; i < count; i++) f(r + i, u * unit, tile + i * unit, tile + (panel_rows + i) * unit);
        }
    }
  }

  // Where this thread's weights of a matrix begin.
  const char *mine(const Matrix &m) const {
    return static_cast<const char *>(m.data) + part_of(m.n / unit, 1, me, team).begin * unit_bytes(m);
  }

  Word cut(Word at) const { return s.hidden - at < unit ? s.hidden - at : unit; }

  // The product's rows, to [rows, hidden], times `scale`, added or instead of what is there.
  void columns(const Matrix &m, const Prepared &p, float *to, bool adds, float scale) {
    product(m, p, s.rows, 1, [&](Word r, Word at, const float *sums, const float *) {
      float *out = to + r * room.hidden + at;
      if (adds) {
        for (Word i = 0; i < cut(at); i++) out[i] += sums[i] * scale;
      } else {
        for (Word i = 0; i < cut(at); i++) out[i] = sums[i] * scale;
      }
    });
  }

  // x += y, or x += norm(y), or x = norm(x + y). add(to, adds): y is added to the rows at `to`, or put there; each thread does its
  // columns.
  template <class F>
  void into_residual(const Layer &y, const Normed &n, const char *next, const F &add) {
    const Word hidden = s.hidden;
    const bool after = y.after;
    float *to = s.sum || (n.weight && !after) ? more : x;
    const bool adds = to == x;
    add(to, adds);
    meeting.wait(next);
    if (s.sum) {
      if (me == 0 && !meeting.failed && !s.sum(s.ranks, more, s.rows * room.hidden)) meeting.failed = true;
      meeting.wait();
    }
    if (!n.weight && adds) return;
    const Range part = part_of(s.rows, 1, me, team);
    for (Word r = part.begin; r < part.end; r++) {
      float *out = x + r * room.hidden;
      if (!adds && (after || !n.weight)) {
        const float *sums = more + r * room.hidden;
        for (Word i = 0; i < hidden; i++) out[i] += sums[i];
        if (!n.weight) continue;
        k.decoder_norm(n, out, hidden, row);
        std::memcpy(out, row, static_cast<std::size_t>(hidden) * 4);
        continue;
      }
      k.decoder_norm(n, to + r * room.hidden, hidden, row);
      for (Word i = 0; i < hidden; i++) out[i] = after ? row[i] : out[i] + row[i];
    }
    meeting.wait();
  }

  // Whether each thread can take whole heads, from their part of the product to attention, and meet nobody in between.
  bool by_heads(const Layer &y) const {
    const Word group = y.heads / y.kv_heads, each = y.kv_heads / team;
    return y.kv_heads % team == 0 && each * group * y.width % unit == 0 && each * y.width % unit == 0 &&
           each * y.value_width % unit == 0 && y.heads * y.width % unit == 0 && y.kv_heads * y.width % unit == 0 && !y.whole;
  }

  // next: the matrix that is read after this layer.
  void layer(const Layer &y, const Matrix &next) {
    const Normed no_norm = {};
    const Normed &first = y.after ? no_norm : y.before_attention, &second = y.after ? no_norm : y.before_feed;
    const Prepared in = prepare(y.qkv, first, x, room.hidden, s.hidden, s.rows, shared);
    if (y.latent) return attended(y, *y.latent, in, second, next);
    const auto keep = [&](Word r, Word at, const float *sums, const float *) {
      std::memcpy(qkv + r * room.qkv + at, sums, sizeof(float) * unit);
    };
    const bool alone = by_heads(y);
    if (alone) {
      const Word group = y.heads / y.kv_heads, from = y.kv_heads * me / team, to = y.kv_heads * (me + 1) / team;
      const Word keys = y.heads * y.width / unit, values = keys + y.kv_heads * y.width / unit;
      product(y.qkv, in, s.rows, 1, {from * group * y.width / unit, to * group * y.width / unit}, keep);
      product(y.qkv, in, s.rows, 1, {keys + from * y.width / unit, keys + to * y.width / unit}, keep);
      product(y.qkv, in, s.rows, 1, {values + from * y.value_width / unit, values + to * y.value_width / unit}, keep);
    } else {
      product(y.qkv, in, s.rows, 1, keep);
    }
    if (y.parallel) {  // the residual is still what attention read
      const Prepared both = prepare(y.up, second.weight ? second : first, x, room.hidden, s.hidden, s.rows, shared2);
      up(y, both);
    }
    if (!alone) meeting.wait();
    attention(y, alone);
    meeting.wait(mine(y.out));
    finish(y, prepare(y.out, no_norm, mixed, room.mixed, y.heads * y.value_width, s.rows, shared), second, next);
  }

  // Everything after attention. second: the norm before the feed-forward part.
  void finish(const Layer &y, const Prepared &mixes, const Normed &second, const Matrix &next) {
    const Normed no_norm = {};
    const float scale = static_cast<float>(y.residual);
    const Matrix &then = y.parallel ? y.down : y.up.data ? y.up : y.experts->router;
    into_residual(y, y.after_attention, mine(then), [&](float *to, bool adds) { columns(y.out, mixes, to, adds, scale); });
    if (y.experts) return experts(y, *y.experts, second, next);
    if (!y.parallel) {
      up(y, prepare(y.up, second, x, room.hidden, s.hidden, s.rows, shared));
      meeting.wait(mine(y.down));
    }
    const Word size = y.gated ? y.up.n / 2 : y.up.n;
    const Prepared mid = prepare(y.down, no_norm, middle, room.middle, size < y.down.k ? size : y.down.k, s.rows, shared);
    into_residual(y, y.after_feed, mine(next), [&](float *to, bool adds) { columns(y.down, mid, to, adds, scale); });
  }

  void up(const Layer &y, const Prepared &p) {
    const auto kind = static_cast<Activation>(y.activation);
    product(y.up, p, s.rows, y.gated ? 2 : 1, [&](Word r, Word at, const float *gate, const float *value) {
      k.decoder_activate(kind, gate, y.gated ? value : nullptr, middle + r * room.middle + at);
    });
  }

  // ---- experts

  // f(first slot of a panel, how many, first output, 32 sums[, 32 more]) for one expert's slots and some of its units. row_of: a slot's
  // inputs. Panels are this thread's own: it gathers what it multiplies, and waits for nobody.
  template <class R, class F>
  void grouped(const Matrix &m, Word from, Word to, Word size, Word pair, const Range &part, const R &row_of, const F &f) {
    const Word slots = to - from, tall = slots <= few_rows ? slots : panel_rows, bytes = k.panel_bytes(m, tall);
    const Word each = block_panels(k.panel_bytes(m, panel_rows)) * tall;
    for (Word first = 0; first < slots && part.begin < part.end; first += each) {
      const Word end = slots < first + each ? slots : first + each;
      for (Word i = first; i < end; i++) {
        const float *source = row_of(from + i);
        if (m.k > size) {
          std::memcpy(row, source, static_cast<std::size_t>(size) * 4);
          std::memset(row + size, 0, static_cast<std::size_t>(m.k - size) * 4);
          source = row;
        }
        k.panel_row(m, source, gathered + (i - first) / tall * bytes, tall, (i - first) % tall);
      }
      for (Word u = part.begin; u < part.end; u++)
        for (Word i = first; i < end; i += tall) {
          const int count = static_cast<int>(end - i < tall ? end - i : tall);
          for (Word half = 0; half < pair; half++)
            k.dense(m, u * pair + half, gathered + (i - first) / tall * bytes, tall, count, tile + half * panel_rows * unit,
                    ahead_of(m, (u + 1) * pair + half, part.end * pair, (i - first) / tall, (end - first + tall - 1) / tall));
          for (int j = 0; j < count; j++) f(from + i + j, u * unit, tile + j * unit, tile + (panel_rows + j) * unit);
        }
    }
  }

  // Every thread chooses for all rows by itself: less than waiting for the others would be.
  Routed route(const Experts &e) {
    auto *numbers = reinterpret_cast<std::int32_t *>(routing);
    const Word all = s.rows * e.chosen;
    Routed r = {numbers, numbers + all, numbers + 2 * all, routing + 2 * all + e.held, routing + 3 * all + e.held};
    for (Word i = 0; i < s.rows; i++)
      choose(e, logits + i * room.logits, r.expert + i * e.chosen, r.weight + i * e.chosen, r.work);
    sort_slots(e, s.rows, r);
    return r;
  }

  // gate and value of an expert, 32 each, to its output.
  void activate(const Layer &y, const Experts &e, float *gate, float *value, float *out) {
    if (e.clamp > 0.0) {
      const float most = static_cast<float>(e.clamp), alpha = static_cast<float>(e.alpha);
      for (Word i = 0; i < unit; i++) {
        gate[i] = (gate[i] > most ? most : gate[i]) * alpha;
        const float v = value[i] > most ? most : value[i] < -most ? -most : value[i];
        value[i] = (v + 1.0f) / alpha;
      }
    }
    k.decoder_activate(e.clamp > 0.0 ? Activation::silu : static_cast<Activation>(y.activation), gate, value, out);
  }

  // The feed-forward part of a layer with experts: its own part for every row if it has one (the shared expert), and the weighted sum
  // of each row's experts. n: the norm before it.
  void experts(const Layer &y, const Experts &e, const Normed &n, const Matrix &next) {
    const Range rows = part_of(s.rows, 1, me, team);
    const Word hidden = s.hidden;
    for (Word r = rows.begin; r < rows.end; r++) {
      if (n.weight) k.decoder_norm(n, x + r * room.hidden, hidden, normed + r * room.hidden);
      else std::memcpy(normed + r * room.hidden, x + r * room.hidden, static_cast<std::size_t>(hidden) * 4);
    }
    meeting.wait();
    const Normed none = {};
    product(e.router, prepare(e.router, none, normed, room.hidden, hidden, s.rows, shared), s.rows, 1,
            [&](Word r, Word at, const float *sums, const float *) {
              std::memcpy(logits + r * room.logits + at, sums, sizeof(float) * unit);
            });
    if (y.up.data) up(y, prepare(y.up, none, normed, room.hidden, hidden, s.rows, shared2));
    meeting.wait(mine(e.held ? e.up[0] : next));
    const Routed routed = route(e);
    const auto begin = [&](Word i) { return i ? Word{routed.ends[i - 1]} : Word{0}; };
    const auto panels = [&](Word i) { return (routed.ends[i] - begin(i) + panel_rows - 1) / panel_rows; };
    // Units of all experts in a row, each as heavy as its expert has panels: every thread takes as much of the whole.
    Word total = 0, before = 0;
    for (Word number = 0; number < e.held; number++) total += panels(number) * (e.up[number].n / (2 * unit));
    const Word from = total * me / team, to = total * (me + 1) / team;
    for (Word number = 0; number < e.held; number++) {
      const Word heavy = panels(number), units = e.up[number].n / (2 * unit);
      if (!heavy) continue;
      const auto unit_at = [&](Word at) {
        const Word u = (at - before + heavy - 1) / heavy;
        return at <= before ? Word{0} : u < units ? u : units;
      };
      grouped(e.up[number], begin(number), routed.ends[number], hidden, 2, {unit_at(from), unit_at(to)},
              [&](Word i) { return normed + routed.slot[i] / e.chosen * room.hidden; },
              [&](Word i, Word at, float *gate, float *value) { activate(y, e, gate, value, of_slots + i * room.slot + at); });
      before += heavy * units;
    }
    const Prepared mid = y.up.data ? prepare(y.down, none, middle, room.middle, y.up.n / 2 < y.down.k ? y.up.n / 2 : y.down.k, s.rows, shared)
                                   : Prepared{};
    meeting.wait(mine(e.held ? e.down[0] : next));
    const float scale = static_cast<float>(y.residual);
    const Range part = part_of((hidden + unit - 1) / unit, 1, me, team);
    into_residual(y, y.after_feed, mine(next), [&](float *out, bool adds) {
      if (!adds)
        for (Word r = 0; r < s.rows; r++)
          for (Word u = part.begin; u < part.end; u++)
            std::memset(out + r * room.hidden + u * unit, 0, static_cast<std::size_t>(cut(u * unit)) * 4);
      const auto add = [&](Word r, Word at, const float *sums, float by) {
        float *sum = out + r * room.hidden + at;
        for (Word i = 0; i < cut(at); i++) sum[i] += sums[i] * by;
      };
      if (y.up.data)
        product(y.down, mid, s.rows, 1, part, [&](Word r, Word at, const float *sums, const float *) {
          const float gate = e.own_gated ? 1.0f / (1.0f + std::exp(-logits[r * room.logits + e.count])) : 1.0f;
          add(r, at, sums, gate * scale);
        });
      for (Word number = 0; number < e.held; number++) {
        if (begin(number) == routed.ends[number]) continue;
        const Word size = e.up[number].n / 2 < e.down[number].k ? e.up[number].n / 2 : e.down[number].k;
        grouped(e.down[number], begin(number), routed.ends[number], size, 1, part, [&](Word i) { return of_slots + i * room.slot; },
                [&](Word i, Word at, const float *sums, const float *) {
                  const Word slot = routed.slot[i];
                  add(slot / e.chosen, at, sums, routed.weight[slot] * scale);
                });
      }
    });
  }

  // ---- latents

  // The part of a layer up to its attention's sums, and then all that follows. in: rows for qkv.
  void attended(const Layer &y, const Latent &l, const Prepared &in, const Normed &second, const Matrix &next) {
    const Normed none = {};
    const bool made = l.query_up.data;  // queries are made of small numbers
    const Word each = l.plain + l.rotated, first = made ? l.small : y.heads * each;
    product(y.qkv, in, s.rows, 1, [&](Word r, Word at, const float *sums, const float *) {
      std::memcpy(qkv + r * room.qkv + at, sums, sizeof(float) * unit);
    });
    meeting.wait(made ? mine(l.query_up) : nullptr);
    if (made) {
      const Prepared small = prepare(l.query_up, l.query_norm, qkv, room.qkv, l.small, s.rows, shared);
      product(l.query_up, small, s.rows, 1, [&](Word r, Word at, const float *sums, const float *) {
        std::memcpy(middle + r * room.middle + at, sums, sizeof(float) * unit);
      });
      meeting.wait();
    }
    float *queries = made ? middle : qkv;
    const Word stride = made ? room.middle : room.qkv;
    for (Word c = 0, number = 0; c < s.num_chunks; c++)
      for (Word i = 0; i < s.chunks[c].count; i++, number++)
        if (number % team == me) {
          const Word r = s.chunks[c].first + i;
          k.decoder_place_latent(s, y, s.chunks[c], r, qkv + r * room.qkv + first, queries + r * stride);
        }
    meeting.wait();
    const Range heads = part_of(y.heads, 1, me, team);
    for (Word h = heads.begin; h < heads.end; h++) {
      per_head(l.key_up[h], l.plain, queries + h * each, stride, wide + h * y.width, l.rank);
      for (Word r = 0; r < s.rows; r++)
        std::memcpy(wide + r * room.wide + h * y.width + l.rank, queries + r * stride + h * each + l.plain,
                    static_cast<std::size_t>(l.rotated) * 4);
    }
    meeting.wait();
    tiles(y, false, wide, room.wide);
    meeting.wait();
    for (Word h = heads.begin; h < heads.end; h++)
      per_head(l.value_up[h], l.rank, mixed + h * l.rank, room.mixed, wide + h * l.value_width, l.value_width);
    meeting.wait(mine(y.out));
    finish(y, prepare(y.out, none, wide, room.wide, y.heads * l.value_width, s.rows, shared), second, next);
  }

  // One head's product of all rows: from [rows, stride] to [rows, room.wide], `wanted` numbers each.
  void per_head(const Matrix &m, Word size, const float *from, Word stride, float *to, Word wanted) {
    grouped(m, 0, s.rows, size, 1, {0, m.n / unit}, [&](Word r) { return from + r * stride; },
            [&](Word r, Word at, const float *sums, const float *) {
              const Word count = wanted - at < unit ? wanted - at : unit;
              if (count > 0) std::memcpy(to + r * room.wide + at, sums, static_cast<std::size_t>(count) * 4);
            });
  }

  // alone: this thread's heads, of all rows; else rows, then tiles of rows and heads, are dealt out.
  void attention(const Layer &y, bool alone) {
    const Word from = alone ? y.kv_heads * me / team : 0, to = alone ? y.kv_heads * (me + 1) / team : y.kv_heads;
    for (Word c = 0, row_number = 0; c < s.num_chunks; c++)
      for (Word i = 0; i < s.chunks[c].count; i++, row_number++)
        if (alone || row_number % team == me) {
          const Word r = s.chunks[c].first + i;
          k.decoder_place(s, y, s.chunks[c], r, from, to, qkv + r * room.qkv);
        }
    if (!alone) meeting.wait();
    tiles(y, alone, qkv, room.qkv);
  }

  // Attention of this thread's tiles of rows and key heads. source: queries [rows, stride].
  void tiles(const Layer &y, bool alone, const float *source, Word stride) {
    const Word group = y.heads / y.kv_heads, tall = group > queries ? 1 : queries / group;
    const Word from = alone ? y.kv_heads * me / team : 0, to = alone ? y.kv_heads * (me + 1) / team : y.kv_heads;
    const Word heads = alone ? to - from : 1;  // of a call
    Attend now = {};
    Word item = 0;
    for (Word c = 0; c < s.num_chunks; c++)
      for (Word i = 0; i < s.chunks[c].count; i += tall)
        for (Word h = from; h < to; h += heads, item++) {
          if (!alone && item % team != me) continue;
          const Word left = s.chunks[c].count - i, rows = left < tall ? left : tall;
          const Attend then = {s.chunks + c, s.chunks[c].first + i, rows, h, heads, source, stride, mixed, room.mixed, nullptr};
          now.next = &then;
          if (now.chunk) k.decoder_attend(s, y, now, attend);
          now = then;
        }
    now.next = nullptr;
    if (now.chunk) k.decoder_attend(s, y, now, attend);
  }

  void run() {
    const Range part = part_of(s.rows, 1, me, team);
    for (Word r = part.begin; r < part.end; r++)
      std::memcpy(x + r * room.hidden, s.x + r * s.hidden, static_cast<std::size_t>(s.hidden) * 4);
    meeting.wait();
    for (Word i = 0; i < s.num_layers; i++)
      layer(s.layers[i], i + 1 < s.num_layers ? s.layers[i + 1].qkv : s.head.data ? s.head : s.layers[0].qkv);
    for (Word r = part.begin; r < part.end; r++)
      std::memcpy(s.x + r * s.hidden, x + r * room.hidden, static_cast<std::size_t>(s.hidden) * 4);
    if (s.head.data == nullptr || s.num_outputs == 0) return;
    const Prepared p = prepare(s.head, s.last, x, room.hidden, s.hidden, s.num_outputs, shared, s.outputs);
    product(s.head, p, s.num_outputs, 1, [&](Word r, Word at, const float *sums, const float *) {
      std::memcpy(s.logits + r * s.head.n + at, sums, sizeof(float) * unit);
    });
  }
};

Word shared_rows(const Step &s) { return s.rows > s.num_outputs ? s.rows : s.num_outputs; }

bool fits_latent(const Step &s, const Layer &y) {
  const Latent &l = *y.latent;
  const Word queries = y.heads * (l.plain + l.rotated), first = l.query_up.data ? l.small : queries;
  if (y.parallel || !l.key_up || !l.value_up || s.kept == Kept::int8 || !l.norm.weight) return false;
  if (y.width != l.rank + l.rotated || y.value_width != l.rank || y.qkv.n < first + y.width) return false;
  if (l.query_up.data && (!fits(l.query_up) || l.query_up.n < queries || l.query_up.k < l.small)) return false;
  for (Word h = 0; h < y.heads; h++)
    if (!fits(l.key_up[h]) || !fits(l.value_up[h]) || l.key_up[h].k < l.plain || l.value_up[h].k < l.rank) return false;
  return true;
}

bool fits_experts(const Layer &y) {
  const Experts &e = *y.experts;
  if (y.parallel || !y.gated || (y.up.data && (!fits(y.up) || !fits(y.down))) || !fits(e.router)) return false;
  if (e.count < 1 || e.router.n < e.count + e.own_gated || e.chosen < 1 || e.chosen > e.count || (e.held && (!e.up || !e.down)))
    return false;
  if (e.first < 0 || e.held < 0 || e.first + e.held > e.count || (e.own_gated && !y.up.data)) return false;
  if (e.groups > 1 && (e.count % e.groups || e.chosen_groups < 1 || e.chosen_groups * (e.count / e.groups) < e.chosen)) return false;
  for (Word x = 0; x < e.held; x++)
    if (!fits(e.up[x]) || !fits(e.down[x]) || e.up[x].n % (2 * unit)) return false;
  return true;
}

Word panels_floats(const Room &room, Word rows) { return (rows + panel_rows - 1) / panel_rows * room.panel / 4; }

}  // namespace

Word scratch_floats(const Step &s, int threads) {
  const Word rows = shared_rows(s);
  const Room room(s, rows);
  return rows * (room.shared_floats() + room.qkv) + 2 * panels_floats(room, rows) + threads * room.own + 64;
}

Status run(const Step &s, int threads) {
  if (s.rows < 0 || s.hidden < 1 || s.num_layers < 0 || s.block_size < 1 || threads < 1) return Status::bad_argument;
  if (s.rows == 0) return Status::ok;
  for (Word i = 0; i < s.num_layers; i++) {
    const Layer &y = s.layers[i];
    if (!fits(y.qkv) || !fits(y.out) || (y.experts ? !fits_experts(y) : !fits(y.up) || !fits(y.down))) return Status::bad_argument;
    if (y.kv_heads < 1 || y.heads % y.kv_heads || !y.keys || (!y.values && !y.latent)) return Status::bad_argument;
    if (y.latent ? !fits_latent(s, y) : y.qkv.n < y.heads * y.width + y.kv_heads * (y.width + y.value_width)) return Status::bad_argument;
    if (y.gated && y.up.data && y.up.n % (2 * unit)) return Status::bad_argument;
    if (s.kept == Kept::int8 && (!y.key_scales || !y.value_scales)) return Status::bad_argument;
  }
  if ((s.head.data && !fits(s.head)) || (s.sum && !s.ranks)) return Status::bad_argument;
  if (!s.x || !s.scratch || scratch_floats(s, threads) > s.scratch_floats) return Status::bad_argument;
  const Room room(s, shared_rows(s));
  Meeting meeting;
  on_threads(threads, [&](int me, int team) {
    if (me == 0) meeting.team = team;
#if defined(_OPENMP)
    if (team > 1) {
#pragma omp barrier
    }
#endif
    const Word rows = shared_rows(s);
    float *at = reinterpret_cast<float *>((reinterpret_cast<std::uintptr_t>(s.scratch) + 63) / 64 * 64);
    const auto take = [&at](Word floats) {
      float *here = at;
      at += floats;
      return here;
    };
    float *x = take(rows * room.hidden), *more = take(rows * room.hidden), *qkv = take(rows * room.qkv);
    float *mixed = take(rows * room.mixed), *middle = take(rows * room.middle);
    float *normed = take(room.logits ? rows * room.hidden : 0), *logits = take(rows * room.logits);
    float *wide = take(rows * room.wide);
    float *of_slots = take(rows * room.slots * room.slot);
    char *shared = reinterpret_cast<char *>(take(panels_floats(room, rows)));
    char *shared2 = reinterpret_cast<char *>(take(panels_floats(room, rows)));
    take(me * room.own);
    char *own = reinterpret_cast<char *>(take(room.few / 4));
    char *gathered = reinterpret_cast<char *>(take(room.block / 4));
    float *tile = take(2 * panel_rows * unit), *row = take(room.row), *routing = take(room.routed);
    Thread t = {s,        kernels(), room,    meeting, me,  team, x,  qkv, mixed, middle, more, normed, logits,
                of_slots, wide,   shared,    shared2, row,     tile, at,   own, gathered, routing};
    t.run();
  });
  return meeting.failed ? Status::rank_failed : Status::ok;
}

}  // namespace ds::decoder
