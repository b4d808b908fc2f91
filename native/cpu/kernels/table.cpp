// One level's table.
#include "declare.h"

#define DS_TEXT2(x) #x
#define DS_TEXT(x) DS_TEXT2(x)
#define DS_CAT2(a, b) a##b
#define DS_CAT(a, b) DS_CAT2(a, b)

namespace ds {
extern const Kernels DS_CAT(kernels_, DS_ISA);
const Kernels DS_CAT(kernels_, DS_ISA) = {
    DS_TEXT(DS_ISA), DS_ISA::update, DS_ISA::measure, DS_ISA::sum_sources, DS_ISA::convert, DS_ISA::fill,
    DS_ISA::triad, DS_ISA::combine, DS_ISA::copy_streaming,
    DS_ISA::quantize_group, DS_ISA::dequantize_groups, DS_ISA::quant_dots, DS_ISA::gather_rows, DS_ISA::sum_rows, DS_ISA::norm_rows,
    DS_ISA::norm_grad_rows,
    DS_ISA::panel_bytes, DS_ISA::panel_row, DS_ISA::dense, DS_ISA::decoder_norm,
    DS_ISA::decoder_activate, DS_ISA::decoder_place_latent, DS_ISA::decoder_place, DS_ISA::attend_floats, DS_ISA::decoder_attend,
};
}  // namespace ds
