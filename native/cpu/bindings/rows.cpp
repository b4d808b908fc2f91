#include <ds/exchange.h>
#include <ds/rows.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

template <class T>
T *pointer(std::uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

int gather_rows(std::uintptr_t out, std::uintptr_t x, std::int64_t rows, std::int64_t row_bytes, std::uintptr_t index, std::int64_t n,
                std::int64_t per, int threads) {
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::gather_rows(pointer<void>(out), pointer<void>(x), rows, row_bytes, pointer<std::int64_t>(index), n, per,
                                          threads));
}

int sum_rows(std::uintptr_t out, std::uintptr_t x, int dtype, std::int64_t rows, std::int64_t cols, std::uintptr_t index,
             std::uintptr_t weights, std::int64_t n, std::int64_t each, int threads) {
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::sum_rows(pointer<void>(out), pointer<void>(x), static_cast<ds::Dtype>(dtype), rows, cols,
                                       pointer<std::int64_t>(index), pointer<float>(weights), n, each, threads));
}

int sort_slots(std::uintptr_t experts, std::int64_t n, std::int64_t count, std::uintptr_t keep, std::uintptr_t slots, std::uintptr_t rows,
               std::uintptr_t ends) {
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::sort_slots(pointer<std::int64_t>(experts), n, count, pointer<unsigned char>(keep),
                                         pointer<std::int64_t>(slots), pointer<std::int64_t>(rows), pointer<std::int64_t>(ends)));
}

int pulls(std::uintptr_t counts, std::int64_t ranks, std::int64_t experts, std::int64_t rank, std::int64_t room, std::uintptr_t inward,
          std::uintptr_t source, std::uintptr_t home, std::uintptr_t ends) {
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::pulls(pointer<std::int64_t>(counts), ranks, experts, rank, room, pointer<std::int64_t>(inward),
                                    pointer<std::int64_t>(source), pointer<std::int64_t>(home), pointer<std::int64_t>(ends)));
}

}  // namespace

void bind_rows(py::module_ &m) {
  m.def("gather_rows", gather_rows, py::arg("out"), py::arg("x"), py::arg("rows"), py::arg("row_bytes"), py::arg("index"), py::arg("n"),
        py::arg("per"), py::arg("threads"));
  m.def("sum_rows", sum_rows, py::arg("out"), py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"), py::arg("index"),
        py::arg("weights"), py::arg("n"), py::arg("each"), py::arg("threads"));
  m.def("sort_slots", sort_slots, py::arg("experts"), py::arg("n"), py::arg("count"), py::arg("keep"), py::arg("slots"), py::arg("rows"),
        py::arg("ends"));
  m.def("pulls", pulls, py::arg("counts"), py::arg("ranks"), py::arg("experts"), py::arg("rank"), py::arg("room"), py::arg("inward"),
        py::arg("source"), py::arg("home"), py::arg("ends"));
}
