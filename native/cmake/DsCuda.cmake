# Finds a CUDA toolkit that works, the way users have it: CMAKE_CUDA_COMPILER, CUDACXX, PATH, CUDA_HOME, CUDA_PATH, or
# /usr/local/cuda. Under AUTO one that is there but compiles nothing costs the module _cuda only, never the CPU kernels.
set(DS_HAVE_CUDA OFF)

# ds_cuda_problem(<nvcc> <out>): why it cannot build _cuda, empty if it can; sets DS_NVCC_VERSION.
function(ds_cuda_problem nvcc out)
  set(${out} "" PARENT_SCOPE)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE status)
  if(NOT status STREQUAL "0" OR NOT said MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${out} "${nvcc} --version does not answer as nvcc does (${status})" PARENT_SCOPE)
    return()
  endif()
  set(version "${CMAKE_MATCH_1}")
  set(DS_NVCC_VERSION "${version}" PARENT_SCOPE)
  if(version VERSION_LESS 11.1)
    set(${out} "${nvcc} is of CUDA ${version}; 11.1 or later is needed" PARENT_SCOPE)
    return()
  endif()
  # A project of its own: asking for the language here would end the configuration if the compiler does not work.
  set(trial "${CMAKE_CURRENT_BINARY_DIR}/cuda_trial")
  file(WRITE "${trial}/CMakeLists.txt"
    "cmake_minimum_required(VERSION 3.22)\nproject(trial LANGUAGES CUDA)\nfind_package(CUDAToolkit REQUIRED)\n"
    "if(NOT TARGET CUDA::cudart_static)\n  message(FATAL_ERROR \"the toolkit has no libcudart_static\")\nendif()\n")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${trial}" -B "${trial}/build" -G "${CMAKE_GENERATOR}"
      "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}" "-DCMAKE_CUDA_COMPILER=${nvcc}" -DCMAKE_CUDA_ARCHITECTURES=80
      -DCMAKE_CUDA_RUNTIME_LIBRARY=Static
    OUTPUT_FILE "${trial}/log" ERROR_FILE "${trial}/log" RESULT_VARIABLE status)
  if(NOT status STREQUAL "0")
    set(${out} "${nvcc} compiles nothing here; ${trial}/log says why" PARENT_SCOPE)
  endif()
endfunction()

if(NOT DS_WITH_CUDA STREQUAL "OFF")
  set(nvcc "${CMAKE_CUDA_COMPILER}")
  if(NOT nvcc)
    set(nvcc "$ENV{CUDACXX}")
  endif()
  if(NOT nvcc)
    find_program(DS_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    set(nvcc "${DS_NVCC}")
  endif()
  if(nvcc)
    ds_cuda_problem("${nvcc}" problem)
  else()
    set(problem "no nvcc was found: set CUDACXX or CUDA_HOME")
  endif()
  if(problem AND DS_WITH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DS_WITH_CUDA=ON, but ${problem}")
  elseif(problem)
    unset(CMAKE_CUDA_COMPILER CACHE)
    message(STATUS "ds: module _cuda is skipped: ${problem}")
  else()
    # Both must be set before the language is enabled; afterwards CMake has taken its own defaults.
    set(CMAKE_CUDA_COMPILER "${nvcc}")
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)  # imports without a driver; not tied to torch's CUDA major version
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      if(DS_CUDA_ARCHS)
        set(CMAKE_CUDA_ARCHITECTURES "${DS_CUDA_ARCHS}")
      elseif(DS_NVCC_VERSION VERSION_GREATER_EQUAL 12.8)  # the first that knows sm_100
        set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100")
      elseif(DS_NVCC_VERSION VERSION_GREATER_EQUAL 11.8)  # the first that knows sm_90
        set(CMAKE_CUDA_ARCHITECTURES "80-real;90")
      else()
        set(CMAKE_CUDA_ARCHITECTURES 80)
      endif()
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(DS_HAVE_CUDA ON)
    message(STATUS "ds: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
  endif()
endif()
