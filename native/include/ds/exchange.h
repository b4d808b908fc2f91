// Integers of expert parallelism: which rows an expert gets, and where they are in memory that ranks share.
#pragma once
#include <ds/types.h>

namespace ds {

// Slots [n] sorted by expert, stable: slots [n] is the slot of each row, rows [n] the row of each slot, ends [count] where each expert's
// rows end. keep [n] bytes, null: all; slots that are not kept come last. bad_argument if an expert is outside [0, count). Cost: two passes
// over n numbers. Source: counting sort, Knuth vol. 3, 5.2.
Status sort_slots(const std::int64_t *experts, std::int64_t n, std::int64_t count, const unsigned char *keep, std::int64_t *slots,
                  std::int64_t *rows, std::int64_t *ends);

// What rank `rank` of `ranks` takes and gets back, each rank having `room` rows of one shared array and counts [ranks, experts] rows for
// each expert, sorted by expert:
//   inward: the rows of its experts, by expert and then by source, where they are at home; source: the first row of that rank
//   home: where the experts' ranks have its own rows, in its own order, if they keep them in the order of their own `inward`
//   ends [experts / ranks]: where the rows of each of its experts end
// inward, source, home [room]: what is not needed stays as it is. bad_argument if a rank has, or gets, more than `room`. Cost: one write.
Status pulls(const std::int64_t *counts, std::int64_t ranks, std::int64_t experts, std::int64_t rank, std::int64_t room,
                std::int64_t *inward, std::int64_t *source, std::int64_t *home, std::int64_t *ends);

}  // namespace ds
