// The loop over layers: one team of threads for the whole step, which meets at a counter.
#include <ds/decoder.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "kernels/table.h"
#include "parallel.h"

namespace ds::decoder {

namespace {

constexpr Word few_rows = 4;  // up to here each thread prepares all rows for itself: cheaper than to meet

Word rounded(Word n, Word to) { return (n + to - 1) / to * to; }

// Threads wait for each other. Each arrival counts; the last one of a round lets the others go on.
struct Meeting {
  std::atomic<int> arrived{0}, round{0};
  int team = 1;
  void wait() {
    if (team == 1) return;
    const int mine = round.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == mine; spins++) {
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
  Word prepared = 0;                                // bytes of a prepared row
  Word row = 0;                                     // floats of a normed row before it is prepared
  Word own = 0;                                     // floats of each thread
  Room(const Step &s) {
    hidden = rounded(s.hidden, 64) + 64;
    Word attend = 0, deepest = hidden;
    const auto see = [&](const Matrix &m) {
      const Word stride = kernels().dense_stride(m);
      prepared = stride > prepared ? stride : prepared;
      deepest = m.k > deepest ? m.k : deepest;
    };
    for (Word i = 0; i < s.num_layers; i++) {
      const Layer &y = s.layers[i];
      see(y.qkv), see(y.out), see(y.up), see(y.down);
      qkv = y.qkv.n > qkv ? y.qkv.n : qkv;
      mixed = y.out.k > mixed ? y.out.k : mixed;
      middle = y.down.k > middle ? y.down.k : middle;
      middle = y.up.n > middle ? y.up.n : middle;
      const Word group = y.heads / y.kv_heads, queries = group > 32 ? group : 32;
      const Word here = 32 * y.width + 16 * y.value_width + queries * (y.value_width + 2);
      attend = here > attend ? here : attend;
    }
    see(s.head);
    qkv = rounded(qkv, 16) + 16;
    mixed = rounded(mixed, 16) + 16;
    middle = rounded(middle, 16) + 16;
    row = rounded(deepest, 16) + 64;
    own = rounded(attend, 16) + row + 2 * most_rows * unit + few_rows * prepared / 4;
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
  char *shared, *shared2;                  // prepared rows
  float *row, *tile, *attend;              // own
  char *own;

  struct Prepared {
    const char *rows;
    Word stride;
  };

  // Rows [rows] of `from` (with a norm, if it has a weight) as the matrix reads them.
  Prepared prepare(const Matrix &m, const Normed &n, const float *from, Word stride, Word size, Word rows, char *to,
                   const Word *picked = nullptr) {
    const Word bytes = k.dense_stride(m);
    const bool alone = rows <= few_rows || team == 1;
    char *base = rows <= few_rows ? own : to;
    const Range part = alone ? Range{0, rows} : part_of(rows, 1, me, team);
    for (Word r = part.begin; r < part.end; r++) {
      const float *source = from + (picked ? picked[r] : r) * stride;
      if (n.weight) {
        k.decoder_norm(n, source, size, row);
      } else {
        std::memcpy(row, source, static_cast<std::size_t>(size) * 4);
      }
      if (m.k > size) std::memset(row + size, 0, static_cast<std::size_t>(m.k - size) * 4);
      k.dense_row(m, row, base + r * bytes);
    }
    if (!alone) meeting.wait();
    return {base, bytes};
  }

  // f(row, first output, 32 sums[, 32 more sums of the next unit]) for every row and unit of a product.
  template <class F>
  void product(const Matrix &m, const Prepared &p, Word rows, Word pair, const F &f) {
    const Range part = part_of(m.n / (unit * pair), 1, me, team);
    for (Word first = 0; first < rows; first += 96)  // a block of rows stays in the second-level cache
      for (Word u = part.begin; u < part.end; u++)
        for (Word r = first; r < rows && r < first + 96; r += most_rows) {
          const Word end = first + 96 < rows ? first + 96 : rows;
          const int count = static_cast<int>(end - r < most_rows ? end - r : most_rows);
          for (Word half = 0; half < pair; half++)
            k.dense(m, u * pair + half, p.rows + r * p.stride, p.stride, count, tile + half * most_rows * unit);
          for (int i = 0; i < count; i++) f(r + i, u * unit, tile + i * unit, tile + (most_rows + i) * unit);
        }
  }

  // x += y, or x += norm(y), or x = norm(x + y), of the product's rows.
  void into_residual(const Matrix &m, const Prepared &p, const Normed &n, bool after) {
    const Word hidden = s.hidden;
    const auto cut = [hidden](Word at) { return hidden - at < unit ? hidden - at : unit; };
    float *to = n.weight && !after ? more : x;
    const bool adds = to == x;
    product(m, p, s.rows, 1, [&](Word r, Word at, const float *sums, const float *) {
      float *out = to + r * room.hidden + at;
      if (adds) {
        for (Word i = 0; i < cut(at); i++) out[i] += sums[i];
      } else {
        std::memcpy(out, sums, static_cast<std::size_t>(cut(at)) * 4);
      }
    });
    meeting.wait();
    if (!n.weight) return;
    const Range part = part_of(s.rows, 1, me, team);
    for (Word r = part.begin; r < part.end; r++) {
      float *out = x + r * room.hidden;
      k.decoder_norm(n, to + r * room.hidden, hidden, row);
      for (Word i = 0; i < hidden; i++) out[i] = after ? row[i] : out[i] + row[i];
    }
    meeting.wait();
  }

  void layer(const Layer &y) {
    const Normed no_norm = {};
    const Normed &first = y.after ? no_norm : y.before_attention, &second = y.after ? no_norm : y.before_feed;
    const Prepared in = prepare(y.qkv, first, x, room.hidden, s.hidden, s.rows, shared);
    product(y.qkv, in, s.rows, 1, [&](Word r, Word at, const float *sums, const float *) {
      std::memcpy(qkv + r * room.qkv + at, sums, sizeof(float) * unit);
    });
    if (y.parallel) {  // the residual is still what attention read
      const Prepared both = prepare(y.up, second.weight ? second : first, x, room.hidden, s.hidden, s.rows, shared2);
      up(y, both);
    }
    meeting.wait();
    attention(y);
    meeting.wait();
    const Prepared mixes = prepare(y.out, no_norm, mixed, room.mixed, y.heads * y.value_width, s.rows, shared);
    into_residual(y.out, mixes, y.after_attention, y.after);
    if (!y.parallel) {
      up(y, prepare(y.up, second, x, room.hidden, s.hidden, s.rows, shared));
      meeting.wait();
    }
    const Word size = y.gated ? y.up.n / 2 : y.up.n;
    const Prepared mid = prepare(y.down, no_norm, middle, room.middle, size < y.down.k ? size : y.down.k, s.rows, shared);
    into_residual(y.down, mid, y.after_feed, y.after);
  }

  void up(const Layer &y, const Prepared &p) {
    const auto kind = static_cast<Activation>(y.activation);
    product(y.up, p, s.rows, y.gated ? 2 : 1, [&](Word r, Word at, const float *gate, const float *value) {
      k.decoder_activate(kind, gate, y.gated ? value : nullptr, middle + r * room.middle + at);
    });
  }

  void attention(const Layer &y) {
    const Word group = y.heads / y.kv_heads, tall = group > 32 ? 1 : 32 / group;
    for (Word c = 0, row_number = 0; c < s.num_chunks; c++)
      for (Word i = 0; i < s.chunks[c].count; i++, row_number++)
        if (row_number % team == me) {
          const Word r = s.chunks[c].first + i;
          k.decoder_place(s, y, s.chunks[c], r, qkv + r * room.qkv);
        }
    meeting.wait();
    Word item = 0;
    for (Word c = 0; c < s.num_chunks; c++)
      for (Word i = 0; i < s.chunks[c].count; i += tall)
        for (Word h = 0; h < y.kv_heads; h++, item++) {
          if (item % team != me) continue;
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
    for (Word i = 0; i < s.num_layers; i++) layer(s.layers[i]);
    for (Word r = part.begin; r < part.end; r++)
      std::memcpy(s.x + r * s.hidden, x + r * room.hidden, static_cast<std::size_t>(s.hidden) * 4);
    if (s.head.data == nullptr || s.num_outputs == 0) return;
    const Prepared p = prepare(s.head, s.last, x, room.hidden, s.hidden, s.num_outputs, shared, s.outputs);
    product(s.head, p, s.num_outputs, 1, [&](Word r, Word at, const float *sums, const float *) {
      std::memcpy(s.logits + r * s.head.n + at, sums, sizeof(float) * unit);
    });
  }
};

bool fits(const Matrix &m) {
  const bool codes = m.kind == Kind::int8 || m.kind == Kind::int4;
  if (!m.data || m.n < unit || m.n % unit || m.k < 8 || m.k % 8) return false;
  return !codes || (m.params && m.group >= 8 && m.group % 8 == 0);
}

Word shared_rows(const Step &s) { return s.rows > s.num_outputs ? s.rows : s.num_outputs; }

}  // namespace

Word scratch_floats(const Step &s, int threads) {
  const Room room(s);
  const Word rows = shared_rows(s);
  return rows * (2 * room.hidden + room.qkv + room.mixed + room.middle) + 2 * rows * room.prepared / 4 + threads * room.own + 64;
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
  if (s.head.data && !fits(s.head)) return Status::bad_argument;
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
    char *shared = reinterpret_cast<char *>(take(rows * room.prepared / 4));
    char *shared2 = reinterpret_cast<char *>(take(rows * room.prepared / 4));
    take(me * room.own);
    char *own = reinterpret_cast<char *>(take(few_rows * room.prepared / 4));
    float *tile = take(2 * most_rows * unit), *row = take(room.row);
    Thread t = {s, kernels(), room, meeting, me, team, x, qkv, mixed, middle, more, shared, shared2, row, tile, at, own};
    t.run();
  });
  return Status::ok;
}

}  // namespace ds::decoder
