#include <ds/decoder.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

// The step's table: `words` says how long the caller takes it to be.
const ds::decoder::Step *step_at(std::uintptr_t step, std::int64_t words) {
  return words * 8 == sizeof(ds::decoder::Step) ? reinterpret_cast<const ds::decoder::Step *>(step) : nullptr;
}

int decoder_step(std::uintptr_t step, std::int64_t words, int threads) {
  const ds::decoder::Step *s = step_at(step, words);
  py::gil_scoped_release nogil;
  return static_cast<int>(s ? ds::decoder::run(*s, threads) : ds::Status::bad_argument);
}

std::int64_t decoder_scratch(std::uintptr_t step, std::int64_t words, int threads) {
  const ds::decoder::Step *s = step_at(step, words);
  return s ? ds::decoder::scratch_floats(*s, threads) : -1;
}

const ds::decoder::Matrix *matrix_at(std::uintptr_t matrix, std::int64_t words) {
  return words * 8 == sizeof(ds::decoder::Matrix) ? reinterpret_cast<const ds::decoder::Matrix *>(matrix) : nullptr;
}

int decoder_product(std::uintptr_t matrix, std::int64_t words, std::uintptr_t x, std::int64_t rows, std::uintptr_t y,
                    std::uintptr_t scratch, int threads) {
  const ds::decoder::Matrix *m = matrix_at(matrix, words);
  py::gil_scoped_release nogil;
  return static_cast<int>(m ? ds::decoder::product(*m, reinterpret_cast<const float *>(x), rows, reinterpret_cast<float *>(y),
                                                   reinterpret_cast<float *>(scratch), threads)
                            : ds::Status::bad_argument);
}

std::int64_t decoder_product_scratch(std::uintptr_t matrix, std::int64_t words, std::int64_t rows) {
  const ds::decoder::Matrix *m = matrix_at(matrix, words);
  return m ? ds::decoder::product_scratch(*m, rows) : -1;
}

}  // namespace

void bind_decoder(py::module_ &m) {
  m.attr("decoder_layer_words") = sizeof(ds::decoder::Layer) / 8;
  m.def("decoder_step", decoder_step, py::arg("step"), py::arg("words"), py::arg("threads"));
  m.def("decoder_product", decoder_product, py::arg("matrix"), py::arg("words"), py::arg("x"), py::arg("rows"), py::arg("y"),
        py::arg("scratch"), py::arg("threads"));
  m.def("decoder_product_scratch", decoder_product_scratch, py::arg("matrix"), py::arg("words"), py::arg("rows"));
  m.def("decoder_scratch", decoder_scratch, py::arg("step"), py::arg("words"), py::arg("threads"));
}
