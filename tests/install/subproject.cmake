# Configures a project that this one is a part of, in a folder with a space in its name and without a
# build type: it must be what it would be alone, but for a target to link.
include(${CMAKE_CURRENT_LIST_DIR}/package.cmake)

set(outer "${WORK}/outer project")
file(REMOVE_RECURSE ${WORK})
file(WRITE "${outer}/CMakeLists.txt" [[
cmake_minimum_required(VERSION 3.25)
project(outer LANGUAGES C CXX)
add_subdirectory("${FLASHMLA}" flashmla)

function(require_same what found wanted)
  if(NOT found STREQUAL wanted)
    message(FATAL_ERROR "${what} is \"${found}\"; it must be \"${wanted}\"")
  endif()
endfunction()
foreach(name BUILD_SHARED_LIBS CMAKE_BUILD_TYPE CMAKE_CXX_STANDARD CMAKE_CXX_VISIBILITY_PRESET)
  require_same(${name} "${${name}}" "")
endforeach()
add_library(own "${SOURCE}")
get_target_property(type own TYPE)
require_same("a library's type" ${type} STATIC_LIBRARY)
get_target_property(type flashmla::flashmla TYPE)
require_same("the type of flashmla" ${type} STATIC_LIBRARY)

# What whoever links it compiles with.
set(property $<TARGET_PROPERTY:flashmla::flashmla,INTERFACE_INCLUDE_DIRECTORIES>)
target_include_directories(own PRIVATE ${property})
set(property $<TARGET_PROPERTY:flashmla::flashmla,INTERFACE_COMPILE_OPTIONS>)
target_compile_options(own PRIVATE ${property})
install(TARGETS own)
]])
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${outer} -B "${WORK}/a build" -D FLASHMLA=${SOURCE_DIR}
    -D SOURCE=${EXAMPLES}/c/decode.c -D CMAKE_C_COMPILER=${CC} -D CMAKE_CXX_COMPILER=${CXX}
    -D CMAKE_BUILD_TYPE= -D CMAKE_INSTALL_LIBDIR=lib -D FLASHMLA_CUDA=OFF
    "-DCMAKE_C_FLAGS=-std=c99 -Wall -Wextra -Werror -pedantic")
run(${CMAKE_COMMAND} --build "${WORK}/a build" --target own)

# It installs what is its own.
run(${CMAKE_COMMAND} --install "${WORK}/a build" --prefix ${WORK}/prefix)
file(GLOB_RECURSE installed RELATIVE ${WORK}/prefix ${WORK}/prefix/*)
if(NOT installed STREQUAL "lib/libown.a")
  message(FATAL_ERROR "the outer project installs ${installed}")
endif()
