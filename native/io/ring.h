// A ring moves pieces: start() queues one, flush() submits what is queued, reap() does that too and waits for a result.
#pragma once
#include <ds/io.h>

#include <memory>

namespace ds::io {

struct Piece {
  int fd;
  bool direct;
  bool write;
  unsigned char *memory;
  std::int64_t nbytes;
  std::int64_t offset;
};

struct Result {
  int slot;
  std::int64_t code;  // bytes moved, or -errno
};

class Ring {
 public:
  virtual ~Ring() = default;
  // At most queue_depth pieces may be under way; `slot` (0..queue_depth-1) comes back with the result.
  virtual void start(int slot, const Piece &piece) = 0;
  // Hands what is queued to the kernel now, as far as it takes it; what it refuses comes back as a result.
  virtual void flush() = 0;
  // Blocks until at least one piece ended; returns how many results were stored (up to queue_depth), or -errno.
  virtual int reap(Result *results) = 0;
};

// Null and *error set where the kernel or a container's policy refuses.
std::unique_ptr<Ring> make_ring(Kind kind, int queue_depth, int *error);

}  // namespace ds::io
