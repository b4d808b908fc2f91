// How threads of a step wait for each other, and how large their buffers are.
#pragma once
#include <ds/decoder.h>

#include <atomic>
#include <thread>

#include "kernels/table.h"
#include "parallel.h"
#include "products.h"
#include "routing.h"

namespace ds::decoder {

constexpr Word few_rows = 4;  // up to here each thread prepares all rows for itself: cheaper than to wait

inline Word rounded(Word n, Word to) { return (n + to - 1) / to * to; }

constexpr Word ahead = 64 << 10;  // bytes of the next matrix that a thread which waits asks for

// Threads wait for each other. Each arrival counts; the last one of a round lets the others go on. next: what is read afterwards.
struct Meeting {
  std::atomic<int> arrived{0}, round{0};
  std::atomic<bool> failed{false};
  int team = 1;
  void wait(const char *next = nullptr) {
    if (team == 1) return;
    const int mine = round.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == mine; spins++) {
      if (next && spins * 64 < ahead) {
        __builtin_prefetch(next + spins * 64, 0, 2);
        continue;
      }
      if (spins > 4096) std::this_thread::yield();  // somebody else may need this core
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  }
};

// Sizes of the buffers, in floats. Each has its own cache lines.
struct Room {
  Word hidden = 0, qkv = 0, mixed = 0, middle = 0;  // floats of a row
  Word few = 0, panel = 0;                          // bytes of the largest panel of few_rows, of panel_rows
  Word row = 0;                                     // floats of a normed row before it is prepared
  Word own = 0;                                     // floats of each thread
  Word logits = 0, slots = 0, slot = 0;             // of experts: floats of a row; slots of a row; floats of a slot
  Word wide = 0;                                    // floats of a row's queries in the latents' space, or of values made of latents
  Word routed = 0, block = 0;                       // of each thread: floats of routing; bytes of a block of panels
  Word shared_floats() const { return (logits ? 3 : 2) * hidden + mixed + middle + logits + slots * slot + wide; }
  Room(const Step &s, Word rows) {
    hidden = rounded(s.hidden, 64) + 64;
    Word attend = 0, deepest = hidden;
    const auto see = [&](const Matrix &m) {
      const Word small = kernels().panel_bytes(m, few_rows), large = kernels().panel_bytes(m, panel_rows);
      few = small > few ? small : few;
      panel = large > panel ? large : panel;
      deepest = m.k > deepest ? m.k : deepest;
    };
    for (Word i = 0; i < s.num_layers; i++) {
      const Layer &y = s.layers[i];
      see(y.qkv), see(y.out);
      if (y.up.data) see(y.up), see(y.down);
      if (y.experts) {
        const Experts &e = *y.experts;
        see(e.router);
        const auto tall = [this](Word &most, Word here) { most = here > most ? here : most; };
        tall(logits, e.router.n), tall(slots, e.chosen), tall(routed, routed_floats(e, rows));
        for (Word x = 0; x < e.held; x++) {
          see(e.up[x]), see(e.down[x]);
          tall(slot, e.up[x].n), tall(slot, e.down[x].k);
          const Word first = kernels().panel_bytes(e.up[x], panel_rows), second = kernels().panel_bytes(e.down[x], panel_rows);
          tall(block, block_panels(first) * first), tall(block, block_panels(second) * second);
        }
      }
      qkv = y.qkv.n > qkv ? y.qkv.n : qkv;
      mixed = y.out.k > mixed ? y.out.k : mixed;
      middle = y.down.k > middle ? y.down.k : middle;
      middle = y.up.n > middle ? y.up.n : middle;
      const auto tall = [](Word &most, Word at) { most = at > most ? at : most; };
      const auto gathers = [&](const Matrix &m) {
        const Word bytes = kernels().panel_bytes(m, panel_rows);
        see(m), tall(block, block_panels(bytes) * bytes);
      };
      if (y.latent) {
        const Latent &l = *y.latent;
        if (l.query_up.data) see(l.query_up), tall(middle, l.query_up.n);
        for (Word h = 0; h < y.heads; h++) gathers(l.key_up[h]), gathers(l.value_up[h]);
        tall(wide, y.heads * y.width), tall(wide, y.heads * l.value_width), tall(mixed, y.heads * l.rank);
      }
      const Word here = kernels().attend_floats(y);
      attend = here > attend ? here : attend;
    }
    see(s.head);
    qkv = rounded(qkv, 16) + 16;
    mixed = rounded(mixed, 16) + 16;
    middle = rounded(middle, 16) + 16;
    row = rounded(deepest, 16) + 64;
    wide = rounded(wide, 16) + (wide ? 16 : 0);
    slot = rounded(slot, 16) + (slot ? 16 : 0);
    block = rounded(block, 64), routed = rounded(routed, 16);
    own = rounded(attend, 16) + row + 2 * panel_rows * unit + few / 4 + block / 4 + routed;
  }
};

}  // namespace ds::decoder
