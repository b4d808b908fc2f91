#include <ds/io.h>
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace py = pybind11;
using ds::io::Engine;
using ds::io::Kind;
using ds::io::Request;
using ds::io::Settings;
using ds::io::Transfer;

namespace {

// Python's view of one transfer: it keeps the exporter of the memory alive until the transfer ended.
class Flight {
 public:
  Flight(Engine &engine, Request request, const py::object &memory) {
    const int flags = request.write ? PyBUF_SIMPLE : PyBUF_WRITABLE;
    if (PyObject_GetBuffer(memory.ptr(), &view_, flags)) throw py::error_already_set();
    request.memory = static_cast<unsigned char *>(view_.buf);
    request.nbytes = view_.len;
    try {
      transfer_ = engine.submit(request);
    } catch (...) {
      PyBuffer_Release(&view_);
      throw;
    }
  }
  Flight(const Flight &) = delete;
  Flight &operator=(const Flight &) = delete;
  ~Flight() {
    wait(-1.0);
    PyBuffer_Release(&view_);
  }
  bool wait(double seconds) const {
    if (transfer_->ended()) return true;
    py::gil_scoped_release nogil;
    const auto limit = seconds < 0 ? std::chrono::nanoseconds(-1)
                                   : std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
    return transfer_->wait(limit);
  }
  bool ended() const { return transfer_->ended(); }
  py::tuple outcome() const { return py::make_tuple(transfer_->error(), transfer_->error_offset()); }

 private:
  Py_buffer view_{};
  std::shared_ptr<Transfer> transfer_;
};

// The engine joins its threads when Python drops it; that must not hold the interpreter.
struct JoinWithoutGil {
  void operator()(Engine *engine) const {
    py::gil_scoped_release nogil;
    delete engine;
  }
};
using EnginePtr = std::unique_ptr<Engine, JoinWithoutGil>;

EnginePtr open_engine(int kind, std::int64_t block_bytes, int queue_depth, int workers, bool single_submit,
                      bool overlap) {
  int error = 0;
  const Settings settings{static_cast<Kind>(kind), block_bytes, queue_depth, workers, single_submit, overlap};
  EnginePtr engine(new Engine(settings, &error));
  if (error) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  return engine;
}

// What O_DIRECT asks of offsets, sizes and memory on this file: at least a page, 0 where it does not work at all.
std::int64_t direct_alignment(int fd) {
#if defined(SYS_statx) && defined(AT_EMPTY_PATH)
  constexpr unsigned dioalign_mask = 0x2000u;  // STATX_DIOALIGN, newer than the headers we build with
  alignas(8) unsigned char raw[256] = {};
  static const char empty[] = "";
  if (::syscall(SYS_statx, fd, empty, AT_EMPTY_PATH, dioalign_mask, raw) == 0) {
    std::uint32_t mask, memory, offset;
    std::memcpy(&mask, raw, 4);             // stx_mask
    std::memcpy(&memory, raw + 0x98, 4);    // stx_dio_mem_align
    std::memcpy(&offset, raw + 0x9c, 4);    // stx_dio_offset_align
    if (mask & dioalign_mask) {
      if (!offset) return 0;
      const std::int64_t most = memory > offset ? memory : offset;
      return most > 4096 ? most : 4096;
    }
  }
#endif
  (void)fd;
  return 4096;
}

}  // namespace

void bind_io(py::module_ &m) {
  py::class_<Engine, EnginePtr>(m, "IoEngine")
      .def(py::init(&open_engine), py::arg("kind"), py::arg("block_bytes"), py::arg("queue_depth"), py::arg("workers"),
           py::arg("single_submit"), py::arg("overlap"))
      .def(
          "submit",
          [](Engine &engine, const py::object &memory, int direct_fd, int buffered_fd, std::int64_t alignment,
             std::int64_t offset, bool write, bool truncate, bool sync) {
            Request r{direct_fd, buffered_fd, alignment, write, truncate, sync, true, nullptr, 0, offset};
            return std::make_unique<Flight>(engine, r, memory);
          },
          py::arg("memory"), py::arg("direct_fd"), py::arg("buffered_fd"), py::arg("alignment"), py::arg("offset"),
          py::arg("write"), py::arg("truncate"), py::arg("sync"), py::keep_alive<0, 1>())
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>());
  py::class_<Flight>(m, "IoFlight")
      .def("wait", &Flight::wait, py::arg("seconds"))
      .def("ended", &Flight::ended)
      .def("outcome", &Flight::outcome);
  m.def("io_probe", [](int kind) { return ds::io::probe(static_cast<Kind>(kind)); }, py::arg("kind"));
  m.def("io_direct_alignment", &direct_alignment, py::arg("fd"));
}
