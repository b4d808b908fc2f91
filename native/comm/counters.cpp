#include <vector>

#include "waiting.h"

namespace ds::shm {

namespace {
constexpr std::int64_t page = 4096;

struct Row {  // of one rank, written by it alone but for the sleepers
  Word reached;
  Place place;
};

bool reached(std::uint32_t now, std::uint32_t value) { return static_cast<std::int32_t>(now - value) >= 0; }
}  // namespace

std::int64_t counters_bytes(int world) {
  return (static_cast<std::int64_t>(sizeof(Row)) * world + page - 1) / page * page;
}

class Counters::Impl {
 public:
  Impl(void *base, int rank, int world, const Peer *peers)
      : rows_(static_cast<Row *>(base)), rank_(rank), peers_(peers, peers + world), roomy_(roomy(world)) {}

  std::uint32_t advance() {
    Word &mine = rows_[rank_].reached;
    const std::uint32_t value = mine.value.load(std::memory_order_relaxed) + 1;
    if (roomy_) rows_[rank_].place.here();
    publish(mine, value);
    return value;
  }

  int behind(std::uint32_t value) const {
    for (std::size_t r = 0; r < peers_.size(); r++)
      if (!reached(rows_[r].reached.value.load(std::memory_order_acquire), value)) return static_cast<int>(r);
    return -1;
  }

  Outcome wait(std::uint32_t value, int spin_us, std::int64_t timeout_ms) {
    const std::int64_t deadline = timeout_ms < 0 ? -1 : now_us() + timeout_ms * 1000;
    for (int r = behind(value); r >= 0; r = behind(value)) {
      Outcome found;
      const auto good = [value](std::uint32_t now) { return reached(now, value); };
      const auto crowded = [&] {
        if (!roomy_) return false;
        rows_[rank_].place.here();
        return r != rank_ && rows_[rank_].place.same(rows_[r].place);
      };
      const auto enough = [&] {
        if (r != rank_ && !alive(peers_[static_cast<std::size_t>(r)])) found = {Code::peer_died, r};
        else if (deadline >= 0 && now_us() >= deadline) found = {Code::timeout, r};
        return found.code != Code::ok;
      };
      if (!wait_for(rows_[r].reached, spin_us, good, crowded, enough)) return found;
    }
    return {};
  }

 private:
  Row *rows_;
  int rank_;
  std::vector<Peer> peers_;
  bool roomy_;
};

Counters::Counters(void *base, int rank, int world, const Peer *peers) : impl_(new Impl(base, rank, world, peers)) {}
Counters::~Counters() { delete impl_; }
std::uint32_t Counters::advance() { return impl_->advance(); }
int Counters::behind(std::uint32_t value) const { return impl_->behind(value); }
Outcome Counters::wait(std::uint32_t value, int spin_us, std::int64_t timeout_ms) {
  return impl_->wait(value, spin_us, timeout_ms);
}

}  // namespace ds::shm
