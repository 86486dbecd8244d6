# Installs a static library to a prefix, and builds and runs an example against it, once through
# find_package and once through pkg-config: what the library needs must come along.
include(${CMAKE_CURRENT_LIST_DIR}/package.cmake)

set(cuda_compiler "")
if(CUDA)
  set(cuda_compiler -D CMAKE_CUDA_COMPILER=${CUDA_COMPILER}) # it need not be in PATH
endif()

file(REMOVE_RECURSE ${WORK})
set(prefix ${WORK}/prefix)
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE_DIR} -B ${WORK}/build
    -D CMAKE_CXX_COMPILER=${CXX} ${cuda_compiler} -D CMAKE_BUILD_TYPE=${BUILD_TYPE}
    -D CMAKE_INSTALL_LIBDIR=lib -D BUILD_SHARED_LIBS=OFF -D FLASHMLA_OPENMP=${OPENMP}
    -D FLASHMLA_CUDA=${CUDA})
file(COPY_FILE ${LIBRARY} ${WORK}/build/libflashmla.a)
run(${CMAKE_COMMAND} --install ${WORK}/build --prefix ${prefix})
build_example(cpp shards ${prefix} lib ${cuda_compiler})

# A C project must say that it links C++.
execute_process(
  COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${EXAMPLES}/c -B ${WORK}/c
          -D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_C_COMPILER=${CC}
  RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE message)
if(status EQUAL 0 OR NOT message MATCHES "static library")
  message(FATAL_ERROR "a C project without CXX ended with ${status}: ${message}")
endif()

pkg_config_flags(flags ${prefix} lib --static --cflags --libs)
run(${CC} -std=c99 ${EXAMPLES}/c/decode.c ${flags} -lm -o ${WORK}/decode)
run(${WORK}/decode)
