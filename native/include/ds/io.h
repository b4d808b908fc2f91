// Asynchronous file transfers between caller memory and files, on io_uring, Linux kernel AIO, or plain threads.
//
// Words: a *transfer* moves one contiguous memory range to or from one file at one offset. It is cut into *pieces* of at
// most block_bytes; every worker thread keeps up to queue_depth pieces in flight. A file opened O_DIRECT also has a
// buffered descriptor: the unaligned head and tail of a transfer go through it, the aligned body goes past the page cache.
// A piece whose memory is not aligned for O_DIRECT is staged through an aligned buffer of its slot (at most
// queue_depth * block_bytes a worker, mapped on first use).
//
// Every completion code is looked at: short transfers continue, EINTR and EAGAIN are repeated, EINVAL of a direct
// descriptor repeats the piece buffered, anything else ends the transfer with the errno and the offset of the piece.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace ds::io {

enum class Kind : std::int32_t { io_uring = 0, libaio = 1, threads = 2 };

struct Settings {
  Kind kind;
  std::int64_t block_bytes;
  int queue_depth;
  int workers;
  bool single_submit;  // one system call a piece instead of one for all that are ready; io_uring and libaio
  bool overlap;        // refill the queue as pieces end; false: only when all of it ended. io_uring and libaio
};

struct Request {
  int direct_fd;    // -1: no O_DIRECT
  int buffered_fd;  // always there
  std::int64_t alignment;  // of file offsets, sizes and memory on direct_fd
  bool write;
  bool truncate;  // after a write: the file ends where the transfer ends
  bool sync;      // after a write: fdatasync
  bool owns_fds;  // close both at the end
  unsigned char *memory;
  std::int64_t nbytes;
  std::int64_t offset;  // in the file
};

// errno value of a read that met the end of the file before all bytes were there. No system call returns it.
constexpr int end_of_file = -1;

class Transfer {
 public:
  explicit Transfer(const Request &request) : request_(request) {}
  // True when it ended; false after `timeout` (negative: wait without limit).
  bool wait(std::chrono::nanoseconds timeout);
  bool ended() const;
  // Valid after it ended: 0, an errno, or end_of_file; and the file offset where that happened.
  int error() const { return error_; }
  std::int64_t error_offset() const { return error_offset_; }

 private:
  friend class Worker;
  friend class Engine;
  Request request_;
  std::int64_t handed_out_ = 0;  // bytes given to workers; guarded by the engine's mutex, like the next three
  int in_flight_ = 0;
  int error_ = 0;
  std::int64_t error_offset_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable done_;
  bool ended_ = false;
};

// 0 when `kind` works on this machine, in this container, now; otherwise the errno of the call that refused.
int probe(Kind kind);

class Engine {
 public:
  // Starts the workers. `error` is 0 or the errno of what failed; then the engine accepts nothing.
  Engine(const Settings &settings, int *error);
  ~Engine();
  // Waits for all transfers and ends the workers. A closed engine must not be given another transfer.
  void close();
  Engine(const Engine &) = delete;
  Engine &operator=(const Engine &) = delete;
  // Memory must stay valid until the transfer ended.
  std::shared_ptr<Transfer> submit(const Request &request);

 private:
  friend class Worker;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ds::io
