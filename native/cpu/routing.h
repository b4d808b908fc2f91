// Which experts a row goes to, and the rows of every expert. Integers and a few floats; no threads.
#pragma once
#include <ds/decoder.h>

#include <cmath>
#include <cstdint>

namespace ds::decoder {

// What a thread knows of a step's rows: `chosen` experts and weights of each; then its slots sorted by expert.
struct Routed {
  std::int32_t *expert, *slot, *ends;  // [rows * chosen]; the same, sorted; [held]: where each expert's slots end
  float *weight, *work;                // [rows * chosen]; [2 * count]
};

inline Word routed_floats(const Experts &e, Word rows) { return 3 * rows * e.chosen + e.held + 2 * e.count; }

// Scores of one row become its experts and their weights. work: [2 * count].
inline void choose(const Experts &e, const float *logits, std::int32_t *expert, float *weight, float *work) {
  float *scores = work, *by = work + e.count;
  const bool late = e.score == Score::softmax_chosen;
  float most = logits[0], sum = 0.0f;
  for (Word i = 1; i < e.count; i++) most = logits[i] > most ? logits[i] : most;
  for (Word i = 0; i < e.count; i++) {
    scores[i] = late ? logits[i] : e.score == Score::sigmoid ? 1.0f / (1.0f + std::exp(-logits[i])) : std::exp(logits[i] - most);
    sum += scores[i];
  }
  for (Word i = 0; i < e.count; i++) {
    if (e.score == Score::softmax) scores[i] /= sum;
    by[i] = e.correction ? scores[i] + e.correction[i] : scores[i];
  }
  const float none = -HUGE_VALF;
  if (e.groups > 1) {
    const Word size = e.count / e.groups;
    const auto value = [&](Word g) {
      float best = none, second = none;
      for (Word i = g * size; i < (g + 1) * size; i++) {
        second = by[i] > best ? best : by[i] > second ? by[i] : second;
        best = by[i] > best ? by[i] : best;
      }
      return e.pair && size > 1 ? best + second : best;
    };
    for (Word dropped = e.groups - e.chosen_groups; dropped > 0; dropped--) {
      Word worst = -1;
      float least = 0.0f;
      for (Word g = 0; g < e.groups; g++) {
        if (by[g * size] == none) continue;  // dropped before
        const float here = value(g);
        if (worst < 0 || here <= least) worst = g, least = here;
      }
      for (Word i = worst * size; i < (worst + 1) * size; i++) by[i] = none;
    }
  }
  float total = 0.0f;
  for (Word c = 0; c < e.chosen; c++) {
    Word best = 0;
    for (Word i = 1; i < e.count; i++) best = by[i] > by[best] ? i : best;
    by[best] = none;
    expert[c] = static_cast<std::int32_t>(best);
    weight[c] = late ? std::exp(scores[best] - most) : scores[best];
    total += weight[c];
  }
  const float whole = e.score == Score::sigmoid ? total + 1e-20f : total, scale = static_cast<float>(e.scale);
  for (Word c = 0; c < e.chosen; c++) weight[c] = (late || e.normalized ? weight[c] / whole : weight[c]) * scale;
}

// Slots (row * chosen + number) of each held expert, one expert after the other. Counting sort.
inline void sort_slots(const Experts &e, Word rows, const Routed &r) {
  for (Word i = 0; i < e.held; i++) r.ends[i] = 0;
  const auto held = [&](Word slot) { return r.expert[slot] - e.first; };
  for (Word slot = 0; slot < rows * e.chosen; slot++)
    if (held(slot) >= 0 && held(slot) < e.held) r.ends[held(slot)]++;
  std::int32_t before = 0;
  for (Word i = 0; i < e.held; i++) {
    const std::int32_t here = r.ends[i];
    r.ends[i] = before;
    before += here;
  }
  for (Word slot = 0; slot < rows * e.chosen; slot++)
    if (held(slot) >= 0 && held(slot) < e.held) r.slot[r.ends[held(slot)]++] = static_cast<std::int32_t>(slot);
}

}  // namespace ds::decoder
