// The loop over layers: one team of threads for the whole step, which meets at a counter.
#include <ds/decoder.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "kernels/table.h"
#include "parallel.h"
#include "products.h"

namespace ds::decoder {

namespace {

constexpr Word few_rows = 4;  // up to here each thread prepares all rows for itself: cheaper than to meet

Word rounded(Word n, Word to) { return (n + to - 1) / to * to; }

constexpr Word ahead = 64 << 10;  // bytes of the next matrix that a thread which waits asks for

// Threads wait for each other. Each arrival counts; the last one of a round lets the others go on. next: what is read afterwards.
struct Meeting {
  std::atomic<int> arrived{0}, round{0};
  std::atomic<bool> failed{false};
  int team = 1;
  void wait(const char *next = nullptr) {
    if (team == 1) return;
    const int mine = round.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == mine; spins++) {
      if (next && spins * 64 < ahead) {
        __builtin_prefetch(next + spins * 64, 0, 2);
        continue;
      }
      if (spins > 4096) std::this_thread::yield();  // somebody else may need this core
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  }
};

// Sizes of the buffers, in floats. Each has its own cache lines.
struct Room {
  Word hidden = 0, qkv = 0, mixed = 0, middle = 0;  // floats of a row
  Word few = 0, panel = 0;                          // bytes of the largest panel of few_rows, of panel_rows
  Word row = 0;                                     // floats of a normed row before it is prepared
  Word own = 0;                                     // floats of each thread
  Room(const Step &s) {
    hidden = rounded(s.hidden, 64) + 64;
    Word attend = 0, deepest = hidden;
    const auto see = [&](const Matrix &m) {
      const Word small = kernels().panel_bytes(m, few_rows), large = kernels().panel_bytes(m, panel_rows);
      few = small > few ? small : few;
      panel = large > panel ? large : panel;
      deepest = m.k > deepest ? m.k : deepest;
    };
    for (Word i = 0; i < s.num_layers; i++) {
      const Layer &y = s.layers[i];
      see(y.qkv), see(y.out), see(y.up), see(y.down);
      qkv = y.qkv.n > qkv ? y.qkv.n : qkv;
      mixed = y.out.k > mixed ? y.out.k : mixed;
      middle = y.down.k > middle ? y.down.k : middle;
      middle = y.up.n > middle ? y.up.n : middle;
      const Word here = kernels().attend_floats(y);
      attend = here > attend ? here : attend;
    }
    see(s.head);
    qkv = rounded(qkv, 16) + 16;
    mixed = rounded(mixed, 16) + 16;
    middle = rounded(middle, 16) + 16;
    row = rounded(deepest, 16) + 64;
    own = rounded(attend, 16) + row + 2 * panel_rows * unit + few / 4;
  }
};

// What one thread needs for a step.
struct Thread {
  const Step &s;
  const Kernels &k;
  const Room &room;
  Meeting &meeting;
  int me, team;
  float *x, *qkv, *mixed, *middle, *more;  // shared, [rows, .]
  char *shared, *shared2;                  // panels
  float *row, *tile, *attend;              // own
  char *own;

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
    for (Word first = 0; first < rows; first += block)
      for (Word u = part.begin; u < part.end; u++)
        for (Word r = first; r < rows && r < first + block; r += p.tall) {
          const int count = static_cast<int>(rows - r < p.tall ? rows - r : p.tall);
          for (Word half = 0; half < pair; half++)
            k.dense(m, u * pair + half, p.panels + r / p.tall * p.bytes, p.tall, count, tile + half * panel_rows * unit);
          for (int i = 0; i < count; i++) f(r + i, u * unit, tile + i * unit, tile + (panel_rows + i) * unit);
        }
  }

  // Where this thread's weights of a matrix begin.
  const char *mine(const Matrix &m) const {
    const Word bits = m.kind == Kind::f32 ? 32 : m.kind == Kind::bf16 ? 16 : m.kind == Kind::int8 ? 8 : 4;
    return static_cast<const char *>(m.data) + part_of(m.n / unit, 1, me, team).begin * (m.k * unit * bits / 8);
  }

  // x += y, or x += norm(y), or x = norm(x + y), of the product's rows.
  void into_residual(const Matrix &m, const Prepared &p, const Layer &y, const Normed &n, const Matrix &next) {
    const Word hidden = s.hidden;
    const bool after = y.after;
    const float scale = static_cast<float>(y.residual);
    const auto cut = [hidden](Word at) { return hidden - at < unit ? hidden - at : unit; };
    float *to = s.sum || (n.weight && !after) ? more : x;
    const bool adds = to == x;
    product(m, p, s.rows, 1, [&](Word r, Word at, const float *sums, const float *) {
      float *out = to + r * room.hidden + at;
      if (adds) {
        for (Word i = 0; i < cut(at); i++) out[i] += sums[i] * scale;
      } else {
        for (Word i = 0; i < cut(at); i++) out[i] = sums[i] * scale;
      }
    });
    meeting.wait(mine(next));
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
    const Prepared mixes = prepare(y.out, no_norm, mixed, room.mixed, y.heads * y.value_width, s.rows, shared);
    into_residual(y.out, mixes, y, y.after_attention, y.parallel ? y.down : y.up);
    if (!y.parallel) {
      up(y, prepare(y.up, second, x, room.hidden, s.hidden, s.rows, shared));
      meeting.wait(mine(y.down));
    }
    const Word size = y.gated ? y.up.n / 2 : y.up.n;
    const Prepared mid = prepare(y.down, no_norm, middle, room.middle, size < y.down.k ? size : y.down.k, s.rows, shared);
    into_residual(y.down, mid, y, y.after_feed, next);
  }

  void up(const Layer &y, const Prepared &p) {
    const auto kind = static_cast<Activation>(y.activation);
    product(y.up, p, s.rows, y.gated ? 2 : 1, [&](Word r, Word at, const float *gate, const float *value) {
      k.decoder_activate(kind, gate, y.gated ? value : nullptr, middle + r * room.middle + at);
    });
  }

  // alone: this thread's heads, of all rows; else rows, then tiles of rows and heads, are dealt out.
  void attention(const Layer &y, bool alone) {
    const Word group = y.heads / y.kv_heads, tall = group > queries ? 1 : queries / group;
    const Word from = alone ? y.kv_heads * me / team : 0, to = alone ? y.kv_heads * (me + 1) / team : y.kv_heads;
    for (Word c = 0, row_number = 0; c < s.num_chunks; c++)
      for (Word i = 0; i < s.chunks[c].count; i++, row_number++)
        if (alone || row_number % team == me) {
          const Word r = s.chunks[c].first + i;
          k.decoder_place(s, y, s.chunks[c], r, from, to, qkv + r * room.qkv);
        }
    if (!alone) meeting.wait();
    Word item = 0;
    for (Word c = 0; c < s.num_chunks; c++)
      for (Word i = 0; i < s.chunks[c].count; i += tall)
        for (Word h = from; h < to; h++, item++) {
          if (!alone && item % team != me) continue;
          const Word left = s.chunks[c].count - i;
          const Attend a = {s.chunks + c, s.chunks[c].first + i, left < tall ? left : tall, h,
                            qkv,          room.qkv,              mixed,                     room.mixed};
          k.decoder_attend(s, y, a, attend);
        }
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

Word panels_floats(const Room &room, Word rows) { return (rows + panel_rows - 1) / panel_rows * room.panel / 4; }

}  // namespace

Word scratch_floats(const Step &s, int threads) {
  const Room room(s);
  const Word rows = shared_rows(s);
  return rows * (2 * room.hidden + room.qkv + room.mixed + room.middle) + 2 * panels_floats(room, rows) + threads * room.own + 64;
}

Status run(const Step &s, int threads) {
  if (s.rows < 0 || s.hidden < 1 || s.num_layers < 0 || s.block_size < 1 || threads < 1) return Status::bad_argument;
  if (s.rows == 0) return Status::ok;
  for (Word i = 0; i < s.num_layers; i++) {
    const Layer &y = s.layers[i];
    if (!fits(y.qkv) || !fits(y.out) || !fits(y.up) || !fits(y.down)) return Status::bad_argument;
    if (y.kv_heads < 1 || y.heads % y.kv_heads || !y.keys || !y.values) return Status::bad_argument;
    if (y.qkv.n < y.heads * y.width + y.kv_heads * (y.width + y.value_width)) return Status::bad_argument;
    if (y.gated && y.up.n % (2 * unit)) return Status::bad_argument;
    if (s.kept == Kept::int8 && (!y.key_scales || !y.value_scales)) return Status::bad_argument;
  }
  if ((s.head.data && !fits(s.head)) || (s.sum && !s.ranks)) return Status::bad_argument;
  if (!s.x || !s.scratch || scratch_floats(s, threads) > s.scratch_floats) return Status::bad_argument;
  const Room room(s);
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
    char *shared = reinterpret_cast<char *>(take(panels_floats(room, rows)));
    char *shared2 = reinterpret_cast<char *>(take(panels_floats(room, rows)));
    take(me * room.own);
    char *own = reinterpret_cast<char *>(take(room.few / 4));
    float *tile = take(2 * panel_rows * unit), *row = take(room.row);
    Thread t = {s, kernels(), room, meeting, me, team, x, qkv, mixed, middle, more, shared, shared2, row, tile, at, own};
    t.run();
  });
  return meeting.failed ? Status::rank_failed : Status::ok;
}

}  // namespace ds::decoder
