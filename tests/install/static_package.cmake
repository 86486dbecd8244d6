# Installs a static library to a prefix, and builds and runs an example against it, once through
# find_package and once through pkg-config: what the library needs must come along.
function(run)
  # Compilers' errors come through the build tool's standard output.
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "failed: ${command}\n${output}")
  endif()
endfunction()

set(toolchain -D CMAKE_CXX_COMPILER=${CXX})
if(CUDA)
  list(APPEND toolchain -D CMAKE_CUDA_COMPILER=${CUDA_COMPILER}) # it need not be in PATH
endif()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE_DIR} -B ${WORK}/build ${toolchain}
    -D CMAKE_BUILD_TYPE=${BUILD_TYPE} -D CMAKE_INSTALL_LIBDIR=${LIBDIR} -D BUILD_SHARED_LIBS=OFF
    -D FLASHMLA_OPENMP=${OPENMP} -D FLASHMLA_CUDA=${CUDA})
file(COPY_FILE ${ARCHIVE} ${WORK}/build/libflashmla.a)
run(${CMAKE_COMMAND} --install ${WORK}/build --prefix ${WORK}/prefix)

# Named, since find_package does not search whatever a library's folder may be called.
set(package -D flashmla_DIR=${WORK}/prefix/${LIBDIR}/cmake/flashmla)
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${EXAMPLES}/cpp -B ${WORK}/cpp ${package} ${toolchain})
run(${CMAKE_COMMAND} --build ${WORK}/cpp)
run(${WORK}/cpp/shards)

# A C project must say that it links C++.
execute_process(
  COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${EXAMPLES}/c -B ${WORK}/c ${package}
          -D CMAKE_C_COMPILER=${CC}
  RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE message)
if(status EQUAL 0 OR NOT message MATCHES "static library")
  message(FATAL_ERROR "a C project without CXX ended with ${status}: ${message}")
endif()

find_program(pkg_config pkg-config REQUIRED)
set(ENV{PKG_CONFIG_PATH} ${WORK}/prefix/${LIBDIR}/pkgconfig)
execute_process(COMMAND ${pkg_config} --static --cflags --libs flashmla OUTPUT_VARIABLE flags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${CC} -std=c99 ${EXAMPLES}/c/decode.c ${flags} -lm -o ${WORK}/decode)
run(${WORK}/decode)
