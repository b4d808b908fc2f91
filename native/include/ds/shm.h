// Collectives of the ranks of one host over one shared segment.
//
// Words: a *segment* is memory mapped by all ranks (a memfd: nothing named, nothing to leak). It holds a control page, and
// for every rank two *slots* used in turn, and for every ordered pair of ranks a *mailbox* of two cells. A collective is cut
// into chunks of one slot; while ranks read slot 0 of each other, the next chunk is written to slot 1. One barrier a chunk
// is enough (two where a result is read back from its owner), because a slot is reused two barriers later.
//
// Reductions add in rank order, half types in fp32, so results are the same bits on every rank and in every run.
// Before moving data, ranks compare what they were asked to do: a rank that came with another operation, size, type or
// root is named instead of corrupting memory. Waiting spins briefly, then sleeps in the kernel, and wakes up regularly to
// look whether a peer has died.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ds::shm {

enum class Element : std::int32_t { f32 = 0, bf16, f16, f64, i64, i32, i16, i8, u8, boolean };
enum class Op : std::int32_t { sum = 0, average, product, min, max, band, bor, bxor };
enum class Verb : std::int32_t {
  barrier = 0, all_reduce, reduce, reduce_scatter, all_gather, all_to_all, broadcast, gather, scatter
};

constexpr std::int64_t size_of(Element e) {
  switch (e) {
    case Element::f64: case Element::i64: return 8;
    case Element::f32: case Element::i32: return 4;
    case Element::bf16: case Element::f16: case Element::i16: return 2;
    default: return 1;
  }
}

enum class Code : std::int32_t { ok = 0, peer_died = 1, timeout = 2, mismatch = 3, aborted = 4, bad_argument = 5 };

// `rank` is a peer that died, did not come, or differs from this rank; -1 where it has no meaning.
struct Outcome {
  Code code = Code::ok;
  std::int32_t rank = -1;
};

// Where what one peer gives or gets lies: rows of `row` bytes, `pitch` apart, from `data` on.
struct Part {
  unsigned char *data;
  std::int64_t row, pitch;
};

// One collective of one rank. `n` counts elements as follows:
//   all_reduce, reduce, broadcast    in [n] (broadcast: root only), out [n]
//   reduce_scatter, scatter          in [world * n] (scatter: root only), out [n]
//   all_gather, gather               in [n], out [world * n] (gather: root only)
//   all_to_all                       in [sum of send], out [sum of receive], elements per peer in send and receive
// in and out may be the same memory for all_reduce, reduce and broadcast, and may overlap in place as in MPI for the rest.
struct Call {
  Verb verb;
  Element element;
  Op op;
  std::int32_t root;
  std::int64_t n;
  const unsigned char *in;
  unsigned char *out;
  const std::int64_t *send;     // [world], all_to_all only
  const std::int64_t *receive;  // [world], all_to_all only
  const Part *parts = nullptr;  // [2 * world], all_to_all only: what goes to each rank, then what comes; null: without gaps, in rank order
};

// A point-to-point transfer with one peer.
struct Letter {
  bool outgoing;
  int peer;
  std::int64_t tag;
  unsigned char *data;
  std::int64_t nbytes;
};

struct Peer {
  std::int32_t pid;
  std::int32_t pidfd;  // -1: liveness is asked by pid
};

struct Layout {
  std::int64_t slot_bytes;     // multiple of 4096
  std::int64_t mailbox_bytes;  // of one cell, multiple of 4096
  std::int64_t total(int world) const;
  // Why no channel of `world` ranks can be laid out so; null if it can. A slot must have a cache line for each rank.
  const char *refusal(int world) const;
};

// Asked now and then by calls that wait in the thread that made them: true ends the call with `aborted`, on every rank. A
// thread that did not set it has none.
using Interrupted = bool (*)();
void set_interrupted(Interrupted hook);
bool interrupted();

// One rank's end of a segment. Calls of one Channel must not overlap in time (its owner queues them).
class Channel {
 public:
  // `base` is the mapped segment, zero-filled before the first rank came. `peers` has `world` entries.
  Channel(void *base, const Layout &layout, int rank, int world, const Peer *peers);
  ~Channel();
  Channel(const Channel &) = delete;
  Channel &operator=(const Channel &) = delete;

  // `spin_us`: how long to spin before sleeping. `timeout_ms` < 0: no limit.
  Outcome run(const Call &call, int spin_us, std::int64_t timeout_ms);
  // The same in two halves, for what needs one barrier only (`single`): `post` shows the others this rank's part and does
  // not wait; `complete` waits for theirs (not at all once `ready`) and takes them. No other collective in between.
  bool single(const Call &call) const;
  Outcome post(const Call &call);
  bool ready();
  Outcome complete(const Call &call, int spin_us, std::int64_t timeout_ms);
  // Moves what can be moved now of a point-to-point transfer, in order per pair of ranks. `moved` is updated.
  // Code::timeout means: not finished yet, call again. The sizes and tags of both sides must be equal.
  Outcome step(const Letter &letter, std::int64_t *moved);
  // ok while nobody aborted and every peer (or `peer` alone, if not negative) is alive.
  Outcome health(int peer);
  // Every rank's present and later calls end with `aborted`.
  void abort();

 private:
  class Impl;
  Impl *impl_;
};

// One number per rank that only grows, in memory that all ranks map: what waits for others without a collective call. A rank
// advances its own when what it wrote before may be read, and waits until all have reached a number. Numbers wrap: two that
// are compared lie less than 2^31 apart. Not thread-safe within a rank.
class Counters {
 public:
  // `base` has counters_bytes(world) bytes, zero before the first rank came. `peers` has `world` entries.
  Counters(void *base, int rank, int world, const Peer *peers);
  ~Counters();
  Counters(const Counters &) = delete;
  Counters &operator=(const Counters &) = delete;

  std::uint32_t advance();
  // The first rank that is behind `value`; -1 if none is, and then what all wrote before is visible.
  int behind(std::uint32_t value) const;
  // Until none is behind. As Channel::run; a timeout or a rank that died ends this wait only.
  Outcome wait(std::uint32_t value, int spin_us, std::int64_t timeout_ms);

 private:
  class Impl;
  Impl *impl_;
};
std::int64_t counters_bytes(int world);  // a multiple of 4096

// A descriptor of an empty file without a name, whose mappings are of huge pages where they ask for it (MADV_HUGEPAGE), or
// -errno where this system does not let its users have that. As private as a memfd, and gone with its last user.
int huge_file();

// Results of at least this size are written past the cache.
constexpr std::int64_t streaming_bytes = 4 << 20;

// dst[i] = op over k of src[k][i], k < count, i < n, dst [n] of `element`; in order of k, 16-bit floats in fp32; average
// divides by count. dst may be one of the sources. One source is copied. Source: MPI 4.0 (2021), section 6.9, in rank order.
// Cost: (count + 1) * n * size_of(element) bytes.
void combine(void *dst, const void *const *src, int count, Element element, Op op, std::int64_t n);

}  // namespace ds::shm
