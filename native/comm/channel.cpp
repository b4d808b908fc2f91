#include <ds/shm.h>

#include <cstring>
#include <vector>

#include "kernels/table.h"
#include "waiting.h"

namespace ds::shm {

namespace {

constexpr std::int64_t page = 4096;
constexpr std::int64_t once_bytes = 32 << 10;  // up to here everyone adds everything, however many they are
constexpr std::int64_t post_bytes = 64 << 10;  // copied in the time that it takes to wake up a thread

// What a rank says it was asked to do; compared before data moves.
struct alignas(line) Claim {
  std::int32_t verb, element, op, root;
  std::int64_t n;
  std::atomic<std::int64_t> call;  // its number, written last: whose is another did not come
};

struct alignas(line) Cell {
  std::int64_t nbytes, tag, total;
};

struct Mailbox {  // of one ordered pair
  Word sent, taken;
  Cell cell[2];
};

struct ControlPage {
  Word arrived, generation, aborted;
  // then: Claim[2][world], Place[world], Mailbox[world][world]
};

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

std::int64_t control_bytes(int world) {
  const std::int64_t w = world;
  const std::int64_t fixed = static_cast<std::int64_t>(sizeof(ControlPage) + (2 * sizeof(Claim) + sizeof(Place)) * w);
  return round_up(fixed + static_cast<std::int64_t>(sizeof(Mailbox)) * w * w, page);
}

}  // namespace

std::int64_t Layout::total(int world) const {
  return control_bytes(world) + 2 * world * slot_bytes + 2ll * world * world * mailbox_bytes;
}

const char *Layout::refusal(int world) const {
  if (world < 1 || slot_bytes < page || mailbox_bytes < page || slot_bytes % page || mailbox_bytes % page)
    return "slots and cells are whole pages";
  if (slot_bytes / world / line == 0) return "a slot needs 64 bytes for each rank";
  if ((1 + static_cast<std::int64_t>(world)) * 8 > slot_bytes) return "a slot needs 8 bytes for each rank and 8 more";
  return nullptr;
}

namespace {
thread_local Interrupted hook_of_thread = nullptr;
}
void set_interrupted(Interrupted hook) { hook_of_thread = hook; }
bool interrupted() { return hook_of_thread && hook_of_thread(); }

class Channel::Impl {
 public:
  Impl(void *base, const Layout &layout, int rank, int world, const Peer *peers)
      : base_(static_cast<unsigned char *>(base)),
        layout_(layout),
        rank_(rank),
        world_(world),
        peers_(peers, peers + world),
        sources_(static_cast<std::size_t>(world)),
        roomy_(roomy(world)) {}

  Outcome run(const Call &c, int spin_us, std::int64_t timeout_ms) {
    begin(spin_us, timeout_ms);
    if (announce(c)) walk(c);
    if (outcome_.code == Code::ok) turn_ ^= 1;  // the next call's claims go to the other row
    return outcome_;
  }

  bool single(const Call &c) const {
    const std::int64_t nbytes = c.n * size_of(c.element);
    const bool parted = c.verb == Verb::reduce_scatter || c.verb == Verb::scatter;
    if (c.verb == Verb::all_to_all || nbytes > (parted ? part_bytes() : layout_.slot_bytes)) return false;
    return nbytes * (parted ? world_ : 1) <= (c.verb == Verb::all_reduce && world_ > 2 ? once_bytes : post_bytes);
  }

  Outcome post(const Call &c) {
    begin(0, -1);
    posting_ = true;
    if (announce(c)) walk(c);
    posting_ = false;
    return outcome_;
  }

  bool ready() { return control().generation.value.load(std::memory_order_acquire) != posted_; }

  Outcome complete(const Call &c, int spin_us, std::int64_t timeout_ms) {
    begin(spin_us, timeout_ms);
    resumed_ = true;
    walk(c);
    resumed_ = false;
    if (outcome_.code == Code::ok) turn_ ^= 1;
    return outcome_;
  }

  // Says what this rank was asked to do. False if nobody listens any more.
  bool announce(const Call &c) {
    if (control().aborted.value.load(std::memory_order_acquire)) return fail(Code::aborted, -1);
    Claim &mine = claim(rank_);
    mine.verb = static_cast<std::int32_t>(c.verb);
    mine.element = static_cast<std::int32_t>(c.element);
    mine.op = static_cast<std::int32_t>(c.op);
    mine.root = c.root;
    mine.n = c.verb == Verb::all_to_all ? -1 : c.n;
    mine.call.store(++calls_, std::memory_order_release);
    return true;
  }

  void walk(const Call &c) {
    switch (c.verb) {
      case Verb::barrier: meet(); break;
      case Verb::all_reduce: all_reduce(c); break;
      case Verb::reduce: reduce(c); break;
      case Verb::reduce_scatter: reduce_scatter(c); break;
      case Verb::all_gather: all_gather(c); break;
      case Verb::all_to_all: all_to_all(c); break;
      case Verb::broadcast: broadcast(c); break;
      case Verb::gather: gather(c); break;
      case Verb::scatter: scatter(c); break;
    }
  }

  Outcome step(const Letter &letter, std::int64_t *moved) {
    // An empty message still takes one cell; -1 says that it did.
    if (*moved < 0 || (letter.nbytes && *moved == letter.nbytes)) return {};
    const int from = letter.outgoing ? rank_ : letter.peer, to = letter.outgoing ? letter.peer : rank_;
    Mailbox &box = mailbox(from, to);
    for (;;) {
      const std::uint32_t sent = box.sent.value.load(std::memory_order_acquire);
      const std::uint32_t taken = box.taken.value.load(std::memory_order_acquire);
      if (letter.outgoing ? sent - taken >= 2 : sent == taken) return {Code::timeout, letter.peer};
      std::int64_t m;
      if (letter.outgoing) {
        m = letter.nbytes - *moved < layout_.mailbox_bytes ? letter.nbytes - *moved : layout_.mailbox_bytes;
        box.cell[sent & 1] = {m, letter.tag, letter.nbytes};
        take(cell(from, to, sent & 1), letter.data + *moved, m);
        publish(box.sent, sent + 1);
      } else {
        const Cell &head = box.cell[taken & 1];
        if (head.total != letter.nbytes || head.tag != letter.tag) return {Code::mismatch, letter.peer};
        m = head.nbytes;
        // What stands in shared memory is another process's word: never more than there is room for.
        if (m < 0 || m > letter.nbytes - *moved || m > layout_.mailbox_bytes) return {Code::mismatch, letter.peer};
        take(letter.data + *moved, cell(from, to, taken & 1), m);
        publish(box.taken, taken + 1);
      }
      *moved += m;
      if (!letter.nbytes) *moved = -1;
      if (*moved == letter.nbytes || *moved < 0) return {};
    }
  }

  Outcome health(int peer) {
    if (control().aborted.value.load(std::memory_order_acquire)) return {Code::aborted, -1};
    for (int r = 0; r < world_; r++)
      if (r != rank_ && (peer < 0 || r == peer) && !alive(peers_[static_cast<std::size_t>(r)])) {
        abort();
        return {Code::peer_died, r};
      }
    return {};
  }

  void abort() {
    control().aborted.value.store(1);
    wake(control().generation);
  }

 private:
  // ---- addresses
  ControlPage &control() { return *reinterpret_cast<ControlPage *>(base_); }
  Claim &claim(int rank) { return reinterpret_cast<Claim *>(base_ + sizeof(ControlPage))[turn_ * world_ + rank]; }
  Place &place(int rank) {
    return reinterpret_cast<Place *>(base_ + sizeof(ControlPage) + sizeof(Claim) * 2 * static_cast<std::size_t>(world_))[rank];
  }
  Mailbox &mailbox(int from, int to) { return reinterpret_cast<Mailbox *>(&place(world_))[from * world_ + to]; }
  unsigned char *slot(int rank, int side) { return base_ + control_bytes(world_) + (2ll * rank + side) * layout_.slot_bytes; }
  unsigned char *cell(int from, int to, std::uint32_t side) {
    const std::int64_t boxes = control_bytes(world_) + 2ll * world_ * layout_.slot_bytes;
    return base_ + boxes + (2ll * (from * world_ + to) + side) * layout_.mailbox_bytes;
  }

  // ---- waiting
  void begin(int spin_us, std::int64_t timeout_ms) {
    outcome_ = {};
    spin_us_ = spin_us;
    deadline_us_ = timeout_ms < 0 ? -1 : now_us() + timeout_ms * 1000;
    checked_ = false;
  }

  // Notes where this rank runs, and whether another was last seen on the same processor.
  bool shares_core() {
    if (!roomy_) return false;
    place(rank_).here();
    bool shared = false;
    for (int r = 0; r < world_; r++) shared |= r != rank_ && place(rank_).same(place(r));
    return shared;
  }

  // Until good(word). False with outcome_ set when it will not come.
  template <class Good>
  bool wait(Word &word, const Good &good) {
    const auto enough = [this] {
      const Outcome state = health(-1);
      if (state.code != Code::ok) return !fail(state.code, state.rank);
      if (interrupted()) {
        abort();
        return !fail(Code::aborted, rank_);
      }
      if (deadline_us_ < 0 || now_us() < deadline_us_) return false;
      abort();  // the barrier has counted us: nobody can use it any more
      return !fail(Code::timeout, missing());
    };
    return wait_for(word, spin_us_, good, [this] { return shares_core(); }, enough);
  }

  // The first rank that did not come to this call; -1 when all did.
  int missing() {
    for (int r = 0; r < world_; r++)
      if (claim(r).call.load(std::memory_order_acquire) < calls_) return r;
    return -1;
  }

  bool fail(Code code, int rank) {
    outcome_ = {code, rank};
    return false;
  }

  // Returns the generation that is over when all have arrived.
  std::uint32_t arrive() {
    ControlPage &c = control();
    const std::uint32_t generation = c.generation.value.load(std::memory_order_acquire);
    // One that has moved and never waits would otherwise be taken for a neighbour where it is no more.
    if (roomy_) place(rank_).here();
    if (c.arrived.value.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(world_)) {
      c.arrived.value.store(0, std::memory_order_relaxed);
      publish(c.generation, generation + 1);
    }
    return generation;
  }
  bool pass(std::uint32_t generation) {
    return wait(control().generation, [&](std::uint32_t now) { return now != generation; });
  }
  bool barrier() { return pass(arrive()); }

  // The barrier that every chunk ends with. The first one of a call also compares the claims.
  bool meet() {
    if (posting_) {
      posted_ = arrive();
      return false;
    }
    const bool arrived = resumed_;
    resumed_ = false;
    if (!pass(arrived ? posted_ : arrive())) return false;
    if (checked_) return true;
    checked_ = true;
    const Claim &mine = claim(rank_);
    for (int r = 0; r < world_; r++) {
      const Claim &theirs = claim(r);
      if (theirs.verb != mine.verb || theirs.element != mine.element || theirs.op != mine.op || theirs.root != mine.root ||
          theirs.n != mine.n)
        return fail(Code::mismatch, r);
    }
    return true;
  }

  // ---- moving data. Every verb walks chunks; `side_` alternates so that a slot is reused two barriers later.
  void put(std::int64_t at, const unsigned char *from, std::int64_t nbytes) {
    if (nbytes && !resumed_) std::memcpy(slot(rank_, side_) + at, from, static_cast<std::size_t>(nbytes));
  }
  static void take(unsigned char *to, const unsigned char *from, std::int64_t nbytes) {
    if (nbytes && to != from) std::memmove(to, from, static_cast<std::size_t>(nbytes));
  }
  // From a slot or from other memory of this rank to what is `large` in all, past the cache then.
  static void deliver(unsigned char *to, const unsigned char *from, std::int64_t nbytes, bool large) {
    const bool apart = to + nbytes <= from || from + nbytes <= to;
    if (large && nbytes && apart) return kernels().copy_streaming(to, from, nbytes);
    take(to, from, nbytes);
  }
  // Calls body(first byte, bytes) for each chunk; at least once, so that empty collectives meet too.
  template <class Body>
  void chunks(std::int64_t nbytes, std::int64_t most, const Body &body) {
    std::int64_t at = 0;
    do {
      const std::int64_t m = nbytes - at < most ? nbytes - at : most;
      if (!body(at, m)) return;
      side_ ^= 1;
      at += m;
    } while (at < nbytes);
  }
  std::int64_t part_bytes() const { return layout_.slot_bytes / world_ / line * line; }

  void combine_into(unsigned char *dst, const Call &c, std::int64_t nbytes, bool large) {
    if (nbytes)
      kernels().combine(dst, sources_.data(), world_, c.element, c.op, nbytes / size_of(c.element), large);
  }

  // Small, or two ranks: everyone adds everything (one barrier). Else each rank adds its part and all read it back.
  void all_reduce(const Call &c) {
    const std::int64_t nbytes = c.n * size_of(c.element);
    const bool once = world_ == 2 || nbytes <= once_bytes;
    const bool large = nbytes >= streaming_bytes && c.in != c.out;  // in place, its lines are in the cache already
    chunks(nbytes, layout_.slot_bytes, [&](std::int64_t at, std::int64_t m) {
      put(0, c.in + at, m);
      if (!meet()) return false;
      if (once) {
        for (int r = 0; r < world_; r++)
          sources_[static_cast<std::size_t>(r)] = r == rank_ ? c.in + at : slot(r, side_);
        combine_into(c.out + at, c, m, large);
        return true;
      }
      const std::int64_t part = round_up((m + world_ - 1) / world_, line);
      const auto lo = [&](int r) { return part * r < m ? part * r : m; };
      for (int r = 0; r < world_; r++) sources_[static_cast<std::size_t>(r)] = slot(r, side_) + lo(rank_);
      combine_into(slot(rank_, side_) + lo(rank_), c, lo(rank_ + 1) - lo(rank_), false);
      if (!barrier()) return false;
      for (int r = 0; r < world_; r++)
        deliver(c.out + at + lo(r), slot(r, side_) + lo(r), lo(r + 1) - lo(r), large);
      return true;
    });
  }

  void reduce(const Call &c) {
    chunks(c.n * size_of(c.element), layout_.slot_bytes, [&](std::int64_t at, std::int64_t m) {
      if (rank_ != c.root) put(0, c.in + at, m);
      if (!meet()) return false;
      if (rank_ == c.root) {
        for (int r = 0; r < world_; r++)
          sources_[static_cast<std::size_t>(r)] = r == rank_ ? c.in + at : slot(r, side_);
        combine_into(c.out + at, c, m, false);
      }
      return true;
    });
  }

  void reduce_scatter(const Call &c) {
    const std::int64_t each = c.n * size_of(c.element);
    chunks(each, part_bytes(), [&](std::int64_t at, std::int64_t m) {
      for (int r = 0; r < world_; r++)
        if (r != rank_) put(part_bytes() * r, c.in + each * r + at, m);
      if (!meet()) return false;
      for (int r = 0; r < world_; r++)
        sources_[static_cast<std::size_t>(r)] = r == rank_ ? c.in + each * r + at : slot(r, side_) + part_bytes() * rank_;
      combine_into(c.out + at, c, m, each >= streaming_bytes);
      return true;
    });
  }

  void all_gather(const Call &c) {
    const std::int64_t each = c.n * size_of(c.element);
    chunks(each, layout_.slot_bytes, [&](std::int64_t at, std::int64_t m) {
      put(0, c.in + at, m);
      if (!meet()) return false;
      for (int r = 0; r < world_; r++)
        deliver(c.out + each * r + at, r == rank_ ? c.in + at : slot(r, side_), m, each * world_ >= streaming_bytes);
      return true;
    });
  }

  void all_to_all(const Call &c) {
    const std::int64_t width = size_of(c.element);
    // Ranks may send different amounts to each other, so the number of chunks is agreed on first.
    std::int64_t most = 0;
    for (int r = 0; r < world_; r++) {
      most = most < c.send[r] ? c.send[r] : most;
      most = most < c.receive[r] ? c.receive[r] : most;
    }
    std::int64_t *table = reinterpret_cast<std::int64_t *>(slot(rank_, side_));
    table[0] = most * width;
    for (int r = 0; r < world_; r++) table[1 + r] = c.send[r];
    if (!meet()) return;
    std::int64_t longest = 0;
    for (int r = 0; r < world_; r++) {
      const std::int64_t *theirs = reinterpret_cast<const std::int64_t *>(slot(r, side_));
      longest = longest < theirs[0] ? theirs[0] : longest;
      if (theirs[1 + rank_] != c.receive[r]) outcome_ = {Code::mismatch, r};
    }
    side_ ^= 1;
    std::vector<Part> dense;
    const Part *to = c.parts, *from = c.parts + world_;
    if (!c.parts) {
      dense.resize(2 * static_cast<std::size_t>(world_));
      unsigned char *in = const_cast<unsigned char *>(c.in), *out = c.out;
      for (int r = 0; r < world_; r++) {
        const std::int64_t sent = c.send[r] * width, got = c.receive[r] * width;
        dense[static_cast<std::size_t>(r)] = {in, sent, sent};
        dense[static_cast<std::size_t>(world_ + r)] = {out, got, got};
        in += sent, out += got;
      }
      to = dense.data(), from = to + world_;
    }
    // What stays with this rank need not pass through its slot, unless results overwrite what is still to be sent.
    const bool direct = apart(to, c.send, from, c.receive, width);
    const bool large = longest * world_ >= streaming_bytes;
    // A mismatch must not leave the others waiting: everyone walks the chunks, the outcome is told at the end.
    chunks(longest, part_bytes(), [&](std::int64_t at, std::int64_t m) {
      for (int r = 0; r < world_; r++)
        if (r != rank_ || !direct)
          rows(to[r], at, within(c.send[r] * width, at, m), [&](unsigned char *data, std::int64_t done, std::int64_t n) {
            put(part_bytes() * r + done, data, n);
          });
      if (!barrier()) return false;
      for (int r = 0; r < world_; r++) {
        const std::int64_t n = within(c.receive[r] * width, at, m);
        if (r != rank_ || !direct) {
          rows(from[r], at, n, [&](unsigned char *data, std::int64_t done, std::int64_t k) {
            deliver(data, slot(r, side_) + part_bytes() * rank_ + done, k, large);
          });
          continue;
        }
        rows(to[r], at, within(c.send[r] * width, at, n), [&](unsigned char *source, std::int64_t done, std::int64_t k) {
          rows(from[r], at + done, k, [&](unsigned char *data, std::int64_t part, std::int64_t j) { deliver(data, source + part, j, large); });
        });
      }
      return true;
    });
  }
  // Calls body(where, bytes before it, bytes) for each stretch of bytes [at, at + m) of a part.
  template <class Body>
  static void rows(const Part &part, std::int64_t at, std::int64_t m, const Body &body) {
    for (std::int64_t done = 0; done < m;) {
      const std::int64_t row = (at + done) / part.row, within_row = (at + done) % part.row;
      const std::int64_t n = part.row - within_row < m - done ? part.row - within_row : m - done;
      body(part.data + row * part.pitch + within_row, done, n);
      done += n;
    }
  }
  // Whether no byte that is sent is also one that is received.
  bool apart(const Part *to, const std::int64_t *send, const Part *from, const std::int64_t *receive, std::int64_t width) const {
    const auto end = [width](const Part &p, std::int64_t n) {
      return p.data + (n * width / p.row - 1) * p.pitch + p.row;
    };
    for (int a = 0; a < world_; a++)
      for (int b = 0; b < world_; b++)
        if (send[a] && receive[b] && to[a].data < end(from[b], receive[b]) && from[b].data < end(to[a], send[a])) return false;
    return true;
  }
  static std::int64_t within(std::int64_t have, std::int64_t at, std::int64_t m) {
    return have <= at ? 0 : have - at < m ? have - at : m;
  }

  void broadcast(const Call &c) {
    chunks(c.n * size_of(c.element), layout_.slot_bytes, [&](std::int64_t at, std::int64_t m) {
      if (rank_ == c.root) put(0, c.in + at, m);
      if (!meet()) return false;
      deliver(c.out + at, rank_ == c.root ? c.in + at : slot(c.root, side_), m, c.n * size_of(c.element) >= streaming_bytes);
      return true;
    });
  }

  void gather(const Call &c) {
    const std::int64_t each = c.n * size_of(c.element);
    chunks(each, layout_.slot_bytes, [&](std::int64_t at, std::int64_t m) {
      if (rank_ != c.root) put(0, c.in + at, m);
      if (!meet()) return false;
      for (int r = 0; rank_ == c.root && r < world_; r++)
        take(c.out + each * r + at, r == rank_ ? c.in + at : slot(r, side_), m);
      return true;
    });
  }

  void scatter(const Call &c) {
    const std::int64_t each = c.n * size_of(c.element);
    chunks(each, part_bytes(), [&](std::int64_t at, std::int64_t m) {
      for (int r = 0; rank_ == c.root && r < world_; r++)
        if (r != rank_) put(part_bytes() * r, c.in + each * r + at, m);
      if (!meet()) return false;
      take(c.out + at, rank_ == c.root ? c.in + each * rank_ + at : slot(c.root, side_) + part_bytes() * rank_, m);
      return true;
    });
  }

  unsigned char *base_;
  Layout layout_;
  int rank_, world_;
  std::vector<Peer> peers_;
  std::vector<const void *> sources_;
  int side_ = 0, turn_ = 0, spin_us_ = 0;
  std::int64_t calls_ = 0;
  std::int64_t deadline_us_ = -1;
  bool checked_ = false;
  bool roomy_;             // there is a processor for every rank
  bool posting_ = false;   // until the barrier only
  bool resumed_ = false;   // from the barrier on
  std::uint32_t posted_ = 0;
  Outcome outcome_;
};

Channel::Channel(void *base, const Layout &layout, int rank, int world, const Peer *peers)
    : impl_(new Impl(base, layout, rank, world, peers)) {}
Channel::~Channel() { delete impl_; }
Outcome Channel::run(const Call &call, int spin_us, std::int64_t timeout_ms) { return impl_->run(call, spin_us, timeout_ms); }
bool Channel::single(const Call &call) const { return impl_->single(call); }
Outcome Channel::post(const Call &call) { return impl_->post(call); }
bool Channel::ready() { return impl_->ready(); }
Outcome Channel::complete(const Call &call, int spin_us, std::int64_t timeout_ms) {
  return impl_->complete(call, spin_us, timeout_ms);
}
Outcome Channel::step(const Letter &letter, std::int64_t *moved) { return impl_->step(letter, moved); }
Outcome Channel::health(int peer) { return impl_->health(peer); }
void Channel::abort() { impl_->abort(); }

void combine(void *dst, const void *const *src, int count, Element element, Op op, std::int64_t n) {
  const std::int64_t nbytes = n * size_of(element);
  bool apart = nbytes >= streaming_bytes;
  for (int k = 0; k < count; k++) apart &= src[k] != dst;
  if (count > 1 || element == Element::boolean) return kernels().combine(dst, src, count, element, op, n, apart);
  if (apart) kernels().copy_streaming(dst, src[0], nbytes);
  else if (nbytes) std::memmove(dst, src[0], static_cast<std::size_t>(nbytes));
}

}  // namespace ds::shm
