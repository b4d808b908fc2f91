#include <ds/exchange.h>

#include <vector>

namespace ds {

using Word = std::int64_t;

Status sort_slots(const Word *experts, Word n, Word count, const unsigned char *keep, Word *slots, Word *rows, Word *ends) {
  if (n < 0 || count < 0 || (n > 0 && (!experts || !slots || !rows)) || (count > 0 && !ends)) return Status::bad_argument;
  std::vector<Word> next(static_cast<std::size_t>(count) + 1, 0);  // of each expert, and of what is not kept
  for (Word i = 0; i < n; i++) {
    if (experts[i] < 0 || experts[i] >= count) return Status::bad_argument;
    next[static_cast<std::size_t>(keep && !keep[i] ? count : experts[i])]++;
  }
  Word end = 0;
  for (Word e = 0; e <= count; e++) {
    const Word here = next[static_cast<std::size_t>(e)];
    next[static_cast<std::size_t>(e)] = end;
    end += here;
    if (e < count) ends[e] = end;
  }
  for (Word i = 0; i < n; i++) {
    const Word row = next[static_cast<std::size_t>(keep && !keep[i] ? count : experts[i])]++;
    slots[row] = i;
    rows[i] = row;
  }
  return Status::ok;
}

Status pulls(const Word *counts, Word ranks, Word experts, Word rank, Word room, Word *inward, Word *source, Word *home, Word *ends) {
  if (ranks < 1 || rank < 0 || rank >= ranks || experts < 0 || experts % ranks || room < 0 || !counts || (experts > 0 && !ends)) return Status::bad_argument;
  const Word local = experts / ranks;
  for (Word r = 0; r < ranks; r++) {
    Word sent = 0, held = 0;
    for (Word e = 0; e < experts; e++) {
      if (counts[r * experts + e] < 0) return Status::bad_argument;
      sent += counts[r * experts + e];
    }
    for (Word from = 0; from < ranks; from++)
      for (Word e = 0; e < local; e++) held += counts[from * experts + r * local + e];
    if (sent > room || held > room) return Status::bad_argument;
  }
  Word mine = 0;  // of this rank's own rows
  for (Word holder = 0; holder < ranks; holder++) {
    Word at = 0;  // of the holder's
    for (Word e = holder * local; e < (holder + 1) * local; e++) {
      for (Word from = 0; from < ranks; from++) {
        const Word count = counts[from * experts + e];
        if (from == rank)
          for (Word i = 0; i < count; i++) home[mine++] = holder * room + at + i;
        if (holder == rank) {
          Word start = from * room;
          for (Word before = 0; before < e; before++) start += counts[from * experts + before];
          for (Word i = 0; i < count; i++) inward[at + i] = start + i, source[at + i] = from * room;
        }
        at += count;
      }
      if (holder == rank) ends[e - holder * local] = at;
    }
  }
  return Status::ok;
}

}  // namespace ds
