#include "kernels/table.h"
#include "parallel.h"

namespace ds {
namespace {

std::int64_t blocks_of(std::int64_t n) { return (n + update_block - 1) / update_block; }

// Elements [lo, hi) of the concatenation of all tensors, each padded to whole blocks so that cuts fall on blocks.
void run_part(const Kernels &k, const Update &u, std::int64_t lo, std::int64_t hi) {
  std::int64_t first = 0;  // block where tensor t starts
  for (std::int64_t t = 0; t < u.list.count && first < hi; t++) {
    const std::int64_t n = u.list.numel[t], blocks = blocks_of(n);
    const std::int64_t b = lo > first ? lo - first : 0, e = hi - first < blocks ? hi - first : blocks;
    if (b < e) {
      Update part = u;
      if (part.partials) part.partials += 2 * first;
      k.update(part, t, b * update_block, e * update_block < n ? e * update_block : n);
    }
    first += blocks;
  }
}

bool complete(const Update &u) {
  const int states = num_states(u.rule);
  const UpdateList &l = u.list;
  if (l.count < 0 || (l.count > 0 && (!l.numel || !l.param || !l.grad))) return false;
  if ((states > 0 && !l.state0) || (states > 1 && !l.state1)) return l.count == 0;
  if (u.rule == Rule::lamb_moments && !u.partials) return false;
  return u.rule != Rule::lamb_apply || u.ratio;
}

}  // namespace

Status update(const Update &u, int threads) {
  if (!complete(u)) return Status::bad_argument;
  std::int64_t blocks = 0;
  for (std::int64_t t = 0; t < u.list.count; t++) {
    if (u.list.numel[t] < 0) return Status::bad_argument;
    blocks += blocks_of(u.list.numel[t]);
  }
  const Kernels &k = kernels();
  on_threads(useful_threads(blocks * update_block, threads), [&](int i, int parts) {
    const Range r = part_of(blocks, 1, i, parts);
    run_part(k, u, r.begin, r.end);
  });
  return Status::ok;
}

}  // namespace ds
