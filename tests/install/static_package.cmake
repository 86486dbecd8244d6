# Installs a static library to a prefix, and builds and runs an example against it, once through
# find_package and once through pkg-config: what the library needs must come along.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_QUIET)
  if(NOT status EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "failed: ${command}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE_DIR} -B ${WORK}/build
    -D CMAKE_CXX_COMPILER=${CXX} -D BUILD_SHARED_LIBS=OFF -D FLASHMLA_OPENMP=${OPENMP}
    -D FLASHMLA_CUDA=${CUDA})
file(COPY_FILE ${ARCHIVE} ${WORK}/build/libflashmla.a)
run(${CMAKE_COMMAND} --install ${WORK}/build --prefix ${WORK}/prefix)

run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${EXAMPLES}/cpp -B ${WORK}/cpp
    -D CMAKE_PREFIX_PATH=${WORK}/prefix -D CMAKE_CXX_COMPILER=${CXX})
run(${CMAKE_COMMAND} --build ${WORK}/cpp)
run(${WORK}/cpp/shards)

# A C project must say that it links C++.
execute_process(
  COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${EXAMPLES}/c -B ${WORK}/c
          -D CMAKE_PREFIX_PATH=${WORK}/prefix -D CMAKE_C_COMPILER=${CC}
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
