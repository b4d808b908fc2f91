#include "progress.h"

#include <algorithm>

namespace ds::shm {

using Clock = std::chrono::steady_clock;

namespace {
constexpr int patient_looks = 1000;
}  // namespace

bool Job::done() {
  if (Progress *helper = helper_.load()) helper->help(*this, Progress::Help::if_ready);
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

bool Job::wait(std::int64_t timeout_ms) {
  if (Progress *helper = helper_.load()) helper->help(*this, timeout_ms < 0 ? Progress::Help::now : Progress::Help::by_thread);
  std::unique_lock<std::mutex> lock(mutex_);
  if (timeout_ms < 0) {
    while (!finished_.wait_for(lock, std::chrono::milliseconds(200), [this] { return done_; })) {
      lock.unlock();
      if (interrupted()) return false;
      lock.lock();
    }
    return true;
  }
  return finished_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return done_; });
}

void Job::finish(Outcome outcome) {
  std::lock_guard<std::mutex> lock(mutex_);
  outcome_ = outcome;
  done_ = true;
  finished_.notify_all();
}

Progress::~Progress() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::lock_guard<std::mutex> lock2(letters_mutex_);
    closing_ = true;
    // The others have what they need of it.
    if (halfway_) take_halfway().job->finish({Code::aborted, -1});
    if (!queue_.empty() || busy_ || !posted_.empty()) channel_.abort();  // nobody may wait for us for ever
  }
  changed_.notify_all();
  letters_changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (letters_thread_.joinable()) letters_thread_.join();
}

Outcome Progress::run(const Call &call, int spin_us, std::int64_t timeout_ms) {
  std::optional<Queued> before;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
    if (halfway_) before = take_halfway();
    busy_ = true;
  }
  if (before) finish(*before, spin_us);
  const Outcome outcome = channel_.run(call, spin_us, timeout_ms);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
  }
  changed_.notify_all();
  return outcome;
}

std::shared_ptr<Job> Progress::start(const Call &call, int world, int spin_us, std::int64_t timeout_ms) {
  Queued queued{call, {}, {}, spin_us, timeout_ms, std::make_shared<Job>()};
  if (call.send) {
    queued.sizes.assign(call.send, call.send + world);
    queued.sizes.insert(queued.sizes.end(), call.receive, call.receive + world);
  }
  if (call.parts) queued.parts.assign(call.parts, call.parts + 2 * world);
  auto job = queued.job;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() && !busy_ && !halfway_ && channel_.single(call)) {
      const Outcome outcome = channel_.post(call);
      if (outcome.code != Code::ok) {
        job->finish(outcome);
        return job;
      }
      queued.posted = true;
      halfway_ = std::move(queued);
      looks_ = 0;
      job->helper_.store(this);
      return job;
    }
    // Another rank may come to the first only after it has what follows the second here: we must not wait for it.
    if (halfway_) queue(take_halfway());
    queue(std::move(queued));
  }
  changed_.notify_all();
  return job;
}

// mutex_ is held.
Progress::Queued Progress::take_halfway() {
  Queued found = std::move(*halfway_);
  halfway_.reset();
  found.job->helper_.store(nullptr);
  return found;
}

// mutex_ is held.
void Progress::queue(Queued queued) {
  if (!thread_.joinable()) thread_ = std::thread([this] { collectives(); });
  queue_.push_back(std::move(queued));
}

// mutex_ is not held, busy_ is set.
Outcome Progress::finish(Queued &queued, int spin_us) {
  if (!queued.sizes.empty()) {
    queued.call.send = queued.sizes.data();
    queued.call.receive = queued.sizes.data() + queued.sizes.size() / 2;
  }
  if (!queued.parts.empty()) queued.call.parts = queued.parts.data();
  const Outcome outcome = queued.posted ? channel_.complete(queued.call, spin_us, queued.timeout_ms)
                                        : channel_.run(queued.call, spin_us, queued.timeout_ms);
  queued.job->finish(outcome);
  return outcome;
}

void Progress::help(const Job &job, Help how) {
  std::optional<Queued> mine;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!halfway_ || halfway_->job.get() != &job) return;  // somebody is at it
    if (how == Help::if_ready && !channel_.ready()) {
      // Whoever only looks must still learn of a rank that died: the thread waits with that care.
      if (++looks_ < patient_looks) return;
      how = Help::by_thread;
    }
    if (how == Help::by_thread) {
      queue(take_halfway());
    } else {
      mine = take_halfway();
      busy_ = true;
    }
  }
  if (mine) {
    finish(*mine, mine->spin_us);
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
  }
  changed_.notify_all();
}

void Progress::collectives() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return (!queue_.empty() && !busy_) || (closing_ && queue_.empty()); });
    if (queue_.empty()) return;
    Queued next = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    finish(next, next.spin_us);
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

std::shared_ptr<Job> Progress::post(const Letter &letter, std::int64_t timeout_ms) {
  const auto deadline = timeout_ms < 0 ? Clock::time_point::max() : Clock::now() + std::chrono::milliseconds(timeout_ms);
  auto job = std::make_shared<Job>();
  {
    std::lock_guard<std::mutex> lock(letters_mutex_);
    if (!letters_thread_.joinable()) letters_thread_ = std::thread([this] { letters(); });
    posted_.push_back({letter, 0, deadline, job});
  }
  letters_changed_.notify_all();
  return job;
}

void Progress::letters() {
  int idle = 0;
  for (;;) {
    std::vector<std::list<Posted>::iterator> active;
    {
      std::unique_lock<std::mutex> lock(letters_mutex_);
      letters_changed_.wait(lock, [this] { return closing_ || !posted_.empty(); });
      if (posted_.empty()) return;
      for (auto it = posted_.begin(); it != posted_.end(); ++it) {
        // Messages of one pair and direction arrive in the order they were posted: only the first may move.
        const bool first = std::none_of(active.begin(), active.end(), [&](auto other) {
          return other->letter.peer == it->letter.peer && other->letter.outgoing == it->letter.outgoing;
        });
        if (first) active.push_back(it);
      }
    }
    bool moved = false;
    std::vector<std::list<Posted>::iterator> ended;
    for (auto it : active) {
      const std::int64_t before = it->moved;
      Outcome outcome = channel_.step(it->letter, &it->moved);
      moved |= it->moved != before;
      if (outcome.code == Code::timeout && (idle & 1023) == 1023) {
        const Outcome state = channel_.health(it->letter.peer);
        if (state.code != Code::ok) outcome = state;
        else if (Clock::now() >= it->deadline) outcome = {Code::timeout, it->letter.peer};
        else continue;
      } else if (outcome.code == Code::timeout) {
        continue;
      }
      it->job->finish(outcome);
      ended.push_back(it);
    }
    if (!ended.empty()) {
      std::lock_guard<std::mutex> lock(letters_mutex_);
      for (auto it : ended) posted_.erase(it);
    }
    idle = moved || !ended.empty() ? 0 : idle + 1;
    // Briefly polite, then asleep: 1023 rounds of looking cost about 50 ms before peers are checked.
    if (idle > 64) std::this_thread::sleep_for(std::chrono::microseconds(idle > 512 ? 100 : 10));
  }
}

}  // namespace ds::shm
