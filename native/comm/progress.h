// Runs the calls of one channel in the order they were made: a blocking call in the caller's thread when nothing is queued,
// others on one thread that knows nothing of Python. Of a small one that meets an empty queue the first half is done at once,
// and the second by whoever comes next: who waits for it or asks for it, or the next call. No thread is woken up for it. Point-to-point transfers have a thread of their own, because a send
// that waits for room must not keep a later collective, or the receive that would make room, from running.
#pragma once
#include <ds/shm.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace ds::shm {

class Progress;

class Job {
 public:
  bool wait(std::int64_t timeout_ms);
  bool done();
  Outcome outcome() const { return outcome_; }

 private:
  friend class Progress;
  void finish(Outcome outcome);
  std::atomic<Progress *> helper_{nullptr};  // while half of it is done and nobody is at it
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  Outcome outcome_;
};

class Progress {
 public:
  explicit Progress(Channel &channel) : channel_(channel) {}
  ~Progress();
  Outcome run(const Call &call, int spin_us, std::int64_t timeout_ms);
  // `send`, `receive` and `parts` of the call are copied; its memory must stay until the job is done.
  std::shared_ptr<Job> start(const Call &call, int world, int spin_us, std::int64_t timeout_ms);
  std::shared_ptr<Job> post(const Letter &letter, std::int64_t timeout_ms);

 private:
  struct Queued {
    Call call;
    std::vector<std::int64_t> sizes;
    std::vector<Part> parts;
    int spin_us;
    std::int64_t timeout_ms;
    std::shared_ptr<Job> job;
    bool posted = false;
  };
  struct Posted {
    Letter letter;
    std::int64_t moved = 0;
    std::chrono::steady_clock::time_point deadline;
    std::shared_ptr<Job> job;
  };
  friend class Job;
  enum class Help { now, if_ready, by_thread };
  void help(const Job &job, Help how);
  Queued take_halfway();
  void queue(Queued queued);
  Outcome finish(Queued &queued, int spin_us);
  void collectives();
  void letters();

  Channel &channel_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  std::optional<Queued> halfway_;  // posted; nothing is queued and nothing runs meanwhile
  int looks_ = 0;                  // at it in vain
  bool busy_ = false;  // a call runs, in whatever thread
  bool closing_ = false;
  std::thread thread_;

  std::mutex letters_mutex_;
  std::condition_variable letters_changed_;
  std::list<Posted> posted_;
  std::thread letters_thread_;
};

}  // namespace ds::shm
