// Words in shared memory that ranks wait for: a short spin, then sleep in the kernel.
//
// Whoever changes a word looks whether anybody sleeps on it; whoever sleeps looks at its peers now and then, so that a rank
// that died is noticed by those who wait for it.
#pragma once
#include <ds/shm.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>

namespace ds::shm {

constexpr std::int64_t line = 64;
constexpr int nap_ms = 50;  // longest sleep before peers are looked at again
// A waiting call spins this long on its own; then it lets others run between looks, since the rank it waits for may need
// the very core that it spins on.
constexpr int selfish_us = 5;

struct alignas(line) Word {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;
};

// The processor that a rank was last seen on, plus one; 0: never seen.
struct alignas(line) Place {
  std::atomic<std::int32_t> cpu;
  void here() { cpu.store(::sched_getcpu() + 1, std::memory_order_relaxed); }
  bool same(const Place &other) const {
    const int mine = cpu.load(std::memory_order_relaxed);
    return mine > 0 && other.cpu.load(std::memory_order_relaxed) == mine;
  }
};

inline std::int64_t now_us() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000ll + t.tv_nsec / 1000;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline std::uint32_t *raw(Word &w) { return reinterpret_cast<std::uint32_t *>(&w.value); }

inline void wake(Word &w) { ::syscall(SYS_futex, raw(w), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

inline void publish(Word &w, std::uint32_t value) {
  w.value.store(value);  // ordered before the look at the sleepers
  if (w.sleepers.load()) wake(w);
}

inline bool alive(const Peer &peer) {
  if (peer.pidfd >= 0) {  // readable once the process ended, even while nobody has reaped it
    pollfd p{peer.pidfd, POLLIN, 0};
    return ::poll(&p, 1, 0) <= 0;
  }
  return ::kill(peer.pid, 0) == 0 || errno != ESRCH;
}

// Whether this process may use a processor for each of `world` ranks.
inline bool roomy(int world) {
  cpu_set_t mine;
  return ::sched_getaffinity(0, sizeof mine, &mine) == 0 && CPU_COUNT(&mine) >= world;
}

// Until good(value of the word): true. Spins up to `spin_us`, not while crowded() (another rank runs where this one does); then
// sleeps, and asks enough() after each nap, which ends it with false.
template <class Good, class Crowded, class Enough>
bool wait_for(Word &word, int spin_us, const Good &good, const Crowded &crowded, const Enough &enough) {
  // The clock is asked now and then only: reading it costs as much as ten pauses.
  for (std::int64_t until = -1;;) {
    for (int i = 0; i < 64; i++) {
      if (good(word.value.load(std::memory_order_acquire))) return true;
      relax();
    }
    const std::int64_t t = now_us();
    if (until < 0) until = t + spin_us;
    if (t >= until) break;
    if (t < until - spin_us + selfish_us) continue;
    // Two ranks that yield to each other stay on one core for long; one that sleeps is woken up on an idle one.
    if (crowded()) break;
    ::sched_yield();
  }
  for (;;) {
    const std::uint32_t seen = word.value.load(std::memory_order_acquire);
    if (good(seen)) return true;
    // Announced before the kernel compares the word: whoever changes it afterwards sees the sleeper and wakes it.
    word.sleepers.fetch_add(1);
    timespec nap{0, nap_ms * 1000000};
    ::syscall(SYS_futex, raw(word), FUTEX_WAIT, seen, &nap, nullptr, 0);
    word.sleepers.fetch_sub(1);
    if (good(word.value.load(std::memory_order_acquire))) return true;
    if (enough()) return false;
  }
}

}  // namespace ds::shm
