/* 100,000 random operations, other ones each time: see test_engine_property.c. */
#include "property.h"

int main(int argc, char **argv)
{
    return property_main(argc, argv, 0, 100000);
}
