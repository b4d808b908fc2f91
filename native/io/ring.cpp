// Raw system calls: neither liburing nor libaio has to be installed.
#include "ring.h"

#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

namespace ds::io {
namespace {

std::int64_t transfer_now(const Piece &p) {
  const ssize_t n = p.write ? ::pwrite(p.fd, p.memory, static_cast<size_t>(p.nbytes), p.offset)
                            : ::pread(p.fd, p.memory, static_cast<size_t>(p.nbytes), p.offset);
  return n < 0 ? -errno : n;
}

// Moves the piece in start(): the worker thread is the asynchrony.
class BlockingRing final : public Ring {
 public:
  explicit BlockingRing(int depth) { results_.reserve(static_cast<size_t>(depth)); }
  void start(int slot, const Piece &piece) override { results_.push_back({slot, transfer_now(piece)}); }
  void flush() override {}
  int reap(Result *out) override {
    const auto n = results_.size();
    if (n) std::memcpy(out, results_.data(), n * sizeof(Result));
    results_.clear();
    return static_cast<int>(n);
  }

 private:
  std::vector<Result> results_;
};

// Linux kernel AIO (the libaio ABI). It is asynchronous for O_DIRECT only, so buffered pieces are moved in start().
class AioRing final : public Ring {
 public:
  explicit AioRing(int depth)
      : depth_(depth), blocks_(static_cast<size_t>(depth)), events_(static_cast<size_t>(depth)) {
    queued_.reserve(static_cast<size_t>(depth));
    now_.reserve(static_cast<size_t>(depth));
  }
  ~AioRing() override {
    if (context_) ::syscall(SYS_io_destroy, context_);
  }
  int open() { return ::syscall(SYS_io_setup, depth_, &context_) < 0 ? errno : 0; }
  void start(int slot, const Piece &p) override {
    if (!p.direct) {
      now_.push_back({slot, transfer_now(p)});
      return;
    }
    iocb &b = blocks_[static_cast<size_t>(slot)];
    std::memset(&b, 0, sizeof b);
    b.aio_data = static_cast<__u64>(slot);
    b.aio_lio_opcode = p.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    b.aio_fildes = static_cast<__u32>(p.fd);
    b.aio_buf = reinterpret_cast<__u64>(p.memory);
    b.aio_nbytes = static_cast<__u64>(p.nbytes);
    b.aio_offset = p.offset;
    queued_.push_back(&b);
  }
  void flush() override {
    size_t at = 0;
    while (at < queued_.size()) {
      const long k = ::syscall(SYS_io_submit, context_, static_cast<long>(queued_.size() - at), queued_.data() + at);
      if (k > 0) {
        at += static_cast<size_t>(k);
        under_way_ += static_cast<int>(k);
      } else if (k < 0 && errno != EAGAIN && errno != EINTR) {
        now_.push_back({static_cast<int>(queued_[at]->aio_data), -errno});  // io_submit stops at the block it refuses
        ++at;
      } else if (under_way_ > 0) {
        break;  // the context is full: reap first, submit the rest next time
      }
    }
    queued_.erase(queued_.begin(), queued_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  int reap(Result *out) override {
    flush();
    int n = static_cast<int>(now_.size());
    if (n) std::memcpy(out, now_.data(), now_.size() * sizeof(Result));
    now_.clear();
    if (under_way_ == 0) return n;
    long got;
    do got = ::syscall(SYS_io_getevents, context_, n ? 0L : 1L, static_cast<long>(under_way_), events_.data(), nullptr);
    while (got < 0 && errno == EINTR);
    if (got < 0) return give_up(errno);
    under_way_ -= static_cast<int>(got);
    for (long i = 0; i < got; ++i)
      out[n++] = {static_cast<int>(events_[static_cast<size_t>(i)].data), events_[static_cast<size_t>(i)].res};
    return n;
  }

 private:
  // io_destroy waits for what is under way: nothing writes to memory that callers have back.
  int give_up(int error) {
    ::syscall(SYS_io_destroy, context_);
    context_ = 0;
    under_way_ = 0;
    queued_.clear();
    if (open()) context_ = 0;  // every later submission is refused
    return -error;
  }

  int depth_, under_way_ = 0;
  aio_context_t context_ = 0;
  std::vector<iocb> blocks_;
  std::vector<iocb *> queued_;
  std::vector<io_event> events_;
  std::vector<Result> now_;
};

class Uring final : public Ring {
 public:
  explicit Uring(int depth) : depth_(depth) {}
  ~Uring() override {
    if (sqes_ != MAP_FAILED) ::munmap(sqes_, sqes_bytes_);
    if (cq_ != MAP_FAILED && cq_ != sq_) ::munmap(cq_, cq_bytes_);
    if (sq_ != MAP_FAILED) ::munmap(sq_, sq_bytes_);
    if (fd_ >= 0) ::close(fd_);
  }
  int open() {
    io_uring_params p;
    std::memset(&p, 0, sizeof p);
    fd_ = static_cast<int>(::syscall(SYS_io_uring_setup, depth_, &p));
    if (fd_ < 0) return errno;
    sq_bytes_ = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    cq_bytes_ = p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe);
    const bool one = p.features & IORING_FEAT_SINGLE_MMAP;
    if (one) sq_bytes_ = cq_bytes_ = sq_bytes_ > cq_bytes_ ? sq_bytes_ : cq_bytes_;
    sq_ = map(sq_bytes_, IORING_OFF_SQ_RING);
    if (sq_ == MAP_FAILED) return errno;
    cq_ = one ? sq_ : map(cq_bytes_, IORING_OFF_CQ_RING);
    if (cq_ == MAP_FAILED) return errno;
    sqes_bytes_ = p.sq_entries * sizeof(io_uring_sqe);
    sqes_ = map(sqes_bytes_, IORING_OFF_SQES);
    if (sqes_ == MAP_FAILED) return errno;
    sq_tail_ = word(sq_, p.sq_off.tail);
    sq_mask_ = *word(sq_, p.sq_off.ring_mask);
    sq_array_ = word(sq_, p.sq_off.array);
    cq_head_ = word(cq_, p.cq_off.head);
    cq_tail_ = word(cq_, p.cq_off.tail);
    cq_mask_ = *word(cq_, p.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe *>(static_cast<char *>(cq_) + p.cq_off.cqes);
    return 0;
  }
  void start(int slot, const Piece &p) override {
    const unsigned tail = *sq_tail_, i = tail & sq_mask_;  // only this thread writes the tail
    io_uring_sqe &e = static_cast<io_uring_sqe *>(sqes_)[i];
    std::memset(&e, 0, sizeof e);
    e.opcode = p.write ? IORING_OP_WRITE : IORING_OP_READ;
    e.fd = p.fd;
    e.addr = reinterpret_cast<__u64>(p.memory);
    e.len = static_cast<__u32>(p.nbytes);
    e.off = static_cast<__u64>(p.offset);
    e.user_data = static_cast<__u64>(slot);
    sq_array_[i] = i;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++queued_;
  }
  void flush() override {
    // What is not taken now (interrupted, completions waiting) is submitted by the next reap().
    enter(0u, 0u);
  }
  int reap(Result *out) override {
    for (;;) {
      const int n = drain(out);
      // What is queued is submitted even when results are there already: the device should not wait for us.
      if (n && !queued_) return n;
      const long k = enter(n ? 0u : 1u, IORING_ENTER_GETEVENTS);
      if (n) return n;
      if (k < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        const int error = errno;
        // The kernel writes to memory of what it has taken, so that is waited for: its results are had without the call that fails.
        if (under_way_ > 0) {
          ::usleep(1000);
          continue;
        }
        __atomic_store_n(sq_tail_, *sq_tail_ - queued_, __ATOMIC_RELEASE);  // what it has not taken it never shall
        queued_ = 0;
        return -error;
      }
    }
  }

 private:
  void *map(size_t bytes, off_t what) {
    return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
  }
  static unsigned *word(void *base, unsigned offset) {
    return reinterpret_cast<unsigned *>(static_cast<char *>(base) + offset);
  }
  long enter(unsigned least, unsigned flags) {
    const long k = ::syscall(SYS_io_uring_enter, fd_, queued_, least, flags, nullptr, 0);
    if (k > 0) {
      queued_ -= static_cast<unsigned>(k);
      under_way_ += static_cast<int>(k);
    }
    return k;
  }
  int drain(Result *out) {
    int n = 0;
    unsigned head = *cq_head_;  // only this thread writes the head
    const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    while (head != tail && n < depth_) {
      const io_uring_cqe &e = cqes_[head & cq_mask_];
      out[n++] = {static_cast<int>(e.user_data), e.res};
      ++head;
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    under_way_ -= n;
    return n;
  }

  int depth_, fd_ = -1, under_way_ = 0;
  unsigned queued_ = 0;
  void *sq_ = MAP_FAILED, *cq_ = MAP_FAILED, *sqes_ = MAP_FAILED;
  size_t sq_bytes_ = 0, cq_bytes_ = 0, sqes_bytes_ = 0;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe *cqes_ = nullptr;
};

}  // namespace

std::unique_ptr<Ring> make_ring(Kind kind, int depth, int *error) {
  *error = 0;
  if (kind == Kind::threads) return std::make_unique<BlockingRing>(depth);
  if (kind == Kind::libaio) {
    auto ring = std::make_unique<AioRing>(depth);
    if ((*error = ring->open())) return nullptr;
    return ring;
  }
  auto ring = std::make_unique<Uring>(depth);
  if ((*error = ring->open())) return nullptr;
  return ring;
}

int probe(Kind kind) {
  int error = 0;
  try {
    make_ring(kind, 1, &error);
  } catch (const std::bad_alloc &) {
    return ENOMEM;
  }
  return error;
}

}  // namespace ds::io
