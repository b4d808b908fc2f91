#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "ring.h"

namespace ds::io {

bool Transfer::ended() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_;
}

bool Transfer::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (timeout.count() < 0) {
    done_.wait(lock, [this] { return ended_; });
    return true;
  }
  return done_.wait_for(lock, timeout, [this] { return ended_; });
}

struct Engine::State {
  Settings settings;
  std::mutex mutex;
  std::condition_variable work;
  std::deque<std::shared_ptr<Transfer>> waiting;  // transfers with bytes not handed out yet
  bool closing = false;
  std::vector<std::thread> threads;
};

class Worker {
 public:
  Worker(Engine::State &state, int slots, std::unique_ptr<Ring> ring)
      : state_(state), ring_(std::move(ring)), slots_(static_cast<size_t>(slots)), results_(static_cast<size_t>(slots)) {
    for (int i = slots; i-- > 0;) free_.push_back(i);
  }
  ~Worker() {
    for (auto &slot : slots_)
      if (slot.stage) ::munmap(slot.stage, static_cast<size_t>(stage_bytes()));
  }

  void run() {
    while (fill()) {
      do reap();
      while (!state_.settings.overlap && free_.size() != slots_.size());
    }
  }

 private:
  struct Slot {
    std::shared_ptr<Transfer> transfer;
    Piece piece;                        // what is still to move
    unsigned char *stage = nullptr;     // page-aligned, for memory that O_DIRECT refuses
    unsigned char *target = nullptr;    // where a staged read goes; null when not staged
    std::int64_t nbytes = 0;            // of the whole piece
  };

  void reap() {
    const int n = ring_->reap(results_.data());
    if (n < 0) {
      // The ring itself failed; nothing can be said of what is under way in it but that it did not succeed.
      for (size_t i = 0; i < slots_.size(); ++i)
        if (slots_[i].transfer) finish(static_cast<int>(i), -n, slots_[i].piece.offset);
      return;
    }
    for (int i = 0; i < n; ++i) landed(results_[static_cast<size_t>(i)]);
  }

  void start(int slot, const Piece &piece) {
    ring_->start(slot, piece);
    if (state_.settings.single_submit) ring_->flush();
  }

  std::int64_t stage_bytes() const { return (state_.settings.block_bytes + 4095) / 4096 * 4096; }

  // Takes pieces until the ring is full or nothing waits. Blocks when nothing is under way. False: time to leave.
  bool fill() {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(state_.mutex);
        if (free_.size() == slots_.size())
          state_.work.wait(lock, [this] { return state_.closing || !state_.waiting.empty(); });
        while (!free_.empty() && !state_.waiting.empty()) {
          auto &transfer = state_.waiting.front();
          Slot &slot = slots_[static_cast<size_t>(free_.back())];
          slot.transfer = transfer;
          cut(*transfer, slot);
          taken_.push_back(free_.back());
          free_.pop_back();
          if (transfer->handed_out_ == transfer->request_.nbytes) state_.waiting.pop_front();
        }
        if (taken_.empty() && free_.size() == slots_.size() && state_.closing) return false;
      }
      for (int i : taken_) launch(i);  // copies and system calls happen outside the lock
      const bool any = free_.size() != slots_.size();
      taken_.clear();
      if (any) return true;
    }
  }

  // The next piece of a transfer: never across an alignment boundary between buffered head, direct body, buffered tail.
  void cut(Transfer &t, Slot &slot) {
    const Request &r = t.request_;
    const std::int64_t at = r.offset + t.handed_out_, left = r.nbytes - t.handed_out_, a = r.alignment;
    std::int64_t n = std::min(left, state_.settings.block_bytes);
    bool direct = r.direct_fd >= 0;
    if (direct && at % a) {
      n = std::min(left, a - at % a);
      direct = false;
    } else if (direct) {
      const std::int64_t body = left / a * a;
      direct = body > 0;
      if (direct) n = std::min(body, std::max(state_.settings.block_bytes / a * a, a));
    }
    slot.piece = {direct ? r.direct_fd : r.buffered_fd, direct, r.write, r.memory + t.handed_out_, n, at};
    slot.nbytes = n;
    slot.target = nullptr;
    t.handed_out_ += n;
    ++t.in_flight_;
  }

  void launch(int index) {
    Slot &slot = slots_[static_cast<size_t>(index)];
    const Request &r = slot.transfer->request_;
    if (slot.piece.direct && reinterpret_cast<std::uintptr_t>(slot.piece.memory) % static_cast<std::uintptr_t>(r.alignment)) {
      if (!slot.stage && slot.nbytes <= stage_bytes()) {
        void *p = ::mmap(nullptr, static_cast<size_t>(stage_bytes()), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p != MAP_FAILED) slot.stage = static_cast<unsigned char *>(p);
      }
      if (slot.stage && slot.nbytes <= stage_bytes()) {
        if (slot.piece.write)
          std::memcpy(slot.stage, slot.piece.memory, static_cast<size_t>(slot.nbytes));
        slot.target = slot.piece.memory;
        slot.piece.memory = slot.stage;
      } else {
        buffered(slot);  // no staging memory: slower, still right
      }
    }
    start(index, slot.piece);
  }

  static void buffered(Slot &slot) {
    slot.piece.fd = slot.transfer->request_.buffered_fd;
    slot.piece.direct = false;
  }

  void landed(const Result &result) {
    Slot &slot = slots_[static_cast<size_t>(result.slot)];
    Piece &p = slot.piece;
    if (result.code < 0) {
      const int error = static_cast<int>(-result.code);
      if (error == EINVAL && p.direct)
        buffered(slot);  // this file system refuses what it announced
      else if (error != EINTR && error != EAGAIN)
        return finish(result.slot, error, p.offset);
      return start(result.slot, p);
    }
    if (result.code == 0 && p.nbytes > 0) return finish(result.slot, p.write ? ENOSPC : end_of_file, p.offset);
    p.memory += result.code;
    p.offset += result.code;
    p.nbytes -= result.code;
    if (p.nbytes == 0) {
      if (slot.target && !p.write) std::memcpy(slot.target, slot.stage, static_cast<size_t>(slot.nbytes));
      return finish(result.slot, 0, 0);
    }
    if (p.direct && (result.code % slot.transfer->request_.alignment)) buffered(slot);
    start(result.slot, p);
  }

  void finish(int index, int error, std::int64_t offset) {
    Slot &slot = slots_[static_cast<size_t>(index)];
    const std::shared_ptr<Transfer> t = std::move(slot.transfer);
    slot.transfer.reset();
    free_.push_back(index);
    bool last;
    {
      std::lock_guard<std::mutex> lock(state_.mutex);
      if (error && (!t->error_ || offset < t->error_offset_)) {  // pieces end in any order; the first byte counts
        t->error_ = error;
        t->error_offset_ = offset;
        if (t->handed_out_ < t->request_.nbytes) {  // the rest is not worth starting
          t->handed_out_ = t->request_.nbytes;
          state_.waiting.erase(std::find(state_.waiting.begin(), state_.waiting.end(), t));
        }
      }
      last = --t->in_flight_ == 0 && t->handed_out_ == t->request_.nbytes;
    }
    if (last) conclude(*t);
  }

 public:
  // After the last piece: length, durability, descriptors, then whoever waits.
  static void conclude(Transfer &t) {
    const Request &r = t.request_;
    const std::int64_t end = r.offset + r.nbytes;
    int error = 0;
    if (!t.error_ && r.write && r.truncate && ::ftruncate(r.buffered_fd, end)) error = errno;
    if (!t.error_ && !error && r.write && r.sync && ::fdatasync(r.buffered_fd)) error = errno;
    if (r.owns_fds) {
      if (r.direct_fd >= 0) ::close(r.direct_fd);
      if (::close(r.buffered_fd) && !error && errno != EINTR) error = errno;  // NFS and quotas report here
    }
    std::lock_guard<std::mutex> lock(t.mutex_);
    if (error && !t.error_) {
      t.error_ = error;
      t.error_offset_ = end;
    }
    t.ended_ = true;
    t.done_.notify_all();
  }

 private:
  Engine::State &state_;
  std::unique_ptr<Ring> ring_;
  std::vector<Slot> slots_;
  std::vector<Result> results_;
  std::vector<int> free_, taken_;
};

Engine::Engine(const Settings &settings, int *error) : state_(std::make_unique<State>()) {
  state_->settings = settings;
  *error = 0;
  // Plain threads have one piece in flight each, so depth is a number of threads there.
  const bool blocking = settings.kind == Kind::threads;
  const int workers = blocking ? std::min(settings.workers * settings.queue_depth, 64) : settings.workers;
  const int slots = blocking ? 1 : settings.queue_depth;
  try {
    for (int i = 0; i < workers; ++i) {
      auto ring = make_ring(settings.kind, slots, error);
      if (*error) break;
      auto worker = std::make_shared<Worker>(*state_, slots, std::move(ring));
      state_->threads.emplace_back([worker] { worker->run(); });
    }
  } catch (const std::bad_alloc &) {
    *error = ENOMEM;
  } catch (const std::system_error &e) {
    *error = e.code().value();
  }
}

Engine::~Engine() { close(); }

void Engine::close() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->closing = true;
  }
  state_->work.notify_all();
  for (auto &thread : state_->threads) thread.join();  // a thread takes its ring with it
  state_->threads.clear();
}

std::shared_ptr<Transfer> Engine::submit(const Request &request) {
  auto transfer = std::make_shared<Transfer>(request);
  if (request.nbytes == 0) {
    Worker::conclude(*transfer);
    return transfer;
  }
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->waiting.push_back(transfer);
  }
  state_->work.notify_all();
  return transfer;
}

}  // namespace ds::io
